"""Mutants of the tuner, of the benchmarks and of bench_serving."""

from __future__ import annotations

from mutant import Mutant, python

CHOOSING = "llm_comm/bench/choosing.py"
MEASURING = "llm_comm/bench/measuring.py"
TUNE = "llm_comm/bench/tune.py"
SUBJECTS = "llm_comm/bench/tune_subjects.py"
AGREEMENT = "llm_comm/bench/agreement.py"
REFERENCE = "llm_comm/bench/reference.py"
REPORT = "llm_comm/bench/report.py"
KILL_WORKER = "bench_serving/kill_worker.py"
CHECKS = "bench_serving/checks.py"
ENGINE_LOGS = "bench_serving/engine_logs.py"
FREE_NORMS = "bench_serving/plugins/llm_comm_bench/free_norms.py"
METRICS = "bench_serving/metrics.py"
SUMMARY = "bench_serving/summary.py"

OF_TUNE = "tests/unit/test_cli_tune.py"
OF_RANKS = "tests/emulated/test_agreement.py"
OF_BENCH = "tests/unit/test_cli_bench.py"
OF_KILLS = "tests/serving/test_kill_worker.py"
OF_FIGURES = "tests/serving/test_bench_figures.py"

BENCH: tuple[Mutant, ...] = (
    # ---- The tuner ----
    python("a simpler candidate must be as fast", CHOOSING, "_NOISE = 0.01", "_NOISE = 0.0", OF_TUNE),
    python("a simpler candidate may be 2 % slower", CHOOSING, "_NOISE = 0.01", "_NOISE = 0.02", OF_TUNE),
    python("a margin below negative times", CHOOSING, "abs(other_us) * _NOISE", "other_us * _NOISE", OF_TUNE),
    python(
        "the last candidate within the noise is taken",
        CHOOSING,
        "for candidate in measured if not is_slower(",
        "for candidate in reversed(measured) if not is_slower(",
        OF_TUNE,
    ),
    python(
        "neighbours that run alike are two rows",
        CHOOSING,
        "if groups and _as_of_size(groups[-1], rows[0].up_to) == _as_of_size(rows, rows[0].up_to):",
        "if False:",
        "tests/unit/test_cli_bench_fused.py",
        OF_TUNE,
    ),
    python(
        "one candidate is timed for all",
        MEASURING,
        "self._comm.use_table(table)",
        "pass",
        OF_TUNE,
    ),
    python("what runs alike is measured again", MEASURING, "if key not in plans:", "if True:", OF_TUNE),
    python("sizes in their order", SUBJECTS, "enumerate((8, 4, 2, 1))", "enumerate((1, 1, 1, 1))", OF_RANKS),
    python("each rank ends by its own clock", MEASURING, "any_rank(time", "bool(time", OF_RANKS),
    python("only one rank's options count", AGREEMENT, "enumerate(everyone)", "enumerate(everyone[:1])", OF_RANKS),
    python("a rank that failed alone ends alone", AGREEMENT, "any_rank(failure is not None, group)", "False", OF_RANKS),
    python(
        "what is out of time is complete",
        TUNE,
        "record.write(is_complete=left == 0)",
        "record.write()",
        "tests/emulated/test_tune_command.py",
    ),
    python(
        "the table ends where NCCL is as fast",
        TUNE,
        "if is_slower(us, nccl.get(row.up_to, us)):",
        "if us > nccl.get(row.up_to, us):",
        OF_TUNE,
    ),
    python(
        "the table goes on where NCCL has won before",
        TUNE,
        "            break\n        won = row.up_to",
        "            continue\n        won = row.up_to",
        OF_TUNE,
    ),
    python(
        "what was not measured loses its limit",
        TUNE,
        "if plain.best else shipped.max_message_bytes",
        "if plain.best else 0",
        OF_TUNE,
    ),
    # ---- The benchmarks ----
    python("a NaN is a right result", REPORT, "not self.error <= 1.0", "self.error > 1.0", OF_BENCH),
    python(
        "a library that was wrong is compared",
        REPORT,
        "if name not in (OURS, OURS_SYMMETRIC) and result.us is not None and not result.wrong",
        "if name not in (OURS, OURS_SYMMETRIC) and result.us is not None",
        OF_BENCH,
    ),
    python(
        "our own symmetric memory is a rival",
        REPORT,
        "if name not in (OURS, OURS_SYMMETRIC) and",
        "if name != OURS and",
        OF_BENCH,
    ),
    python(
        "gathered parts need not be all there",
        REFERENCE,
        "return 0.0 if torch.equal(actual, expected)",
        "return 0.0 if torch.equal(actual[:-1], expected[:-1])",
        OF_BENCH,
    ),
    python(
        "every rank's part of sums is the first",
        REFERENCE,
        "self._first = Reference(count * world, world, dtype, device), rank * count",
        "self._first = Reference(count * world, world, dtype, device), 0",
        OF_BENCH,
    ),
    python(
        "the slowest rival is the one to beat",
        REPORT,
        "return min(others, key=others.__getitem__)",
        "return max(others, key=others.__getitem__)",
        OF_BENCH,
    ),
    python(
        "a speed-up upside down",
        REPORT,
        "return other / ours if other and ours",
        "return ours / other if other and ours",
        OF_BENCH,
    ),
    # ---- The drill in an engine ----
    python("an engine may end as if all were well", KILL_WORKER, "if status == 0:", "if status is None:", OF_KILLS),
    python("an engine may end late", KILL_WORKER, "if left or seconds > limit:", "if left:", OF_KILLS),
    python(
        "an engine may leave processes",
        KILL_WORKER,
        "if left or seconds > limit:",
        "if seconds > limit + 60:",
        OF_KILLS,
    ),
    python("nobody need be named", KILL_WORKER, "if not named:", "if False:", OF_KILLS),
    python(
        "a line from before the kill names the lost rank",
        KILL_WORKER,
        "after = session.text()[len(before) :]",
        "after = session.text()",
        OF_KILLS,
    ),
    python("rank 1 is named by a line about rank 11", KILL_WORKER, r"|{pid})\b", r"|{pid})", OF_KILLS),
    python("a failed drill ends with status 0", KILL_WORKER, "return 1 if failures else 0", "return 0", OF_KILLS),
    # ---- Figures and checks ----
    python("a token too many", METRICS, "following = sum(self.counts) - 1", "following = sum(self.counts)", OF_FIGURES),
    python(
        "decoding begins with the first request",
        METRICS,
        "begin = max(request.times[0] for request in batch)",
        "begin = min(request.times[0] for request in batch)",
        OF_FIGURES,
    ),
    python(
        "decoding ends with the last request",
        METRICS,
        "end = min(request.times[-1] for request in batch)",
        "end = max(request.times[-1] for request in batch)",
        OF_FIGURES,
    ),
    python(
        "speed-ups of other repeats",
        SUMMARY,
        "ratios = [theirs[repeat] / own[repeat] for repeat in own if repeat in theirs]",
        "ratios = [x / y for x, y in zip(sorted(theirs.values()), sorted(own.values()))]",
        OF_FIGURES,
    ),
    python(
        "speed-ups upside down",
        SUMMARY,
        "theirs[repeat] / own[repeat] for",
        "own[repeat] / theirs[repeat] for",
        OF_FIGURES,
    ),
    python(
        "failed runs count",
        SUMMARY,
        "good = [run for run in runs if not run.failure and run.result is not None]",
        "good = [run for run in runs if run.result is not None]",
        OF_FIGURES,
        "tests/serving/test_ab.py",
    ),
    python(
        "NaN logits agree",
        CHECKS,
        'if not entry["distance_to_nccl"] <= limit:',
        'if entry["distance_to_nccl"] > limit:',
        OF_FIGURES,
    ),
    python(
        "NaN logits of a prompt are overlooked",
        CHECKS,
        "np.median(distances) if self.by_median else np.max(distances)",
        "np.nanmedian(distances) if self.by_median else np.nanmax(distances)",
        OF_FIGURES,
    ),
    python(
        "one prompt may be far from nccl's where the median is judged",
        CHECKS,
        'elif tolerance_of(arm).by_median and not max(entry["distances"]) <= MOST_OF_ONE_PROMPT:',
        'elif tolerance_of(arm).by_median and not min(entry["distances"]) <= MOST_OF_ONE_PROMPT:',
        OF_FIGURES,
    ),
    python(
        "logits may be all equal",
        CHECKS,
        "np.isfinite(row).all() and np.ptp(row) > 0",
        "np.isfinite(row).all()",
        OF_FIGURES,
    ),
    python(
        "logits may be infinite", CHECKS, "np.isfinite(row).all() and np.ptp(row) > 0", "np.ptp(row) > 0", OF_FIGURES
    ),
    python(
        "logits may differ ten times as much", CHECKS, "PLAIN = Tolerance(0.04)", "PLAIN = Tolerance(0.4)", OF_FIGURES
    ),
    python(
        "the engine's own rounding is no measure",
        CHECKS,
        "max(tolerance.distance, TIMES_DEFAULT * theirs)",
        "tolerance.distance",
        OF_FIGURES,
    ),
    python(
        "exact sums are judged like lossy ones",
        CHECKS,
        "of_lossy if arms.ARMS[arm].lossy else tolerance",
        "of_lossy",
        OF_FIGURES,
    ),
    python(
        "tokens may differ between repeats",
        CHECKS,
        "if request != first[size][index]",
        "if len(request) != len(first[size][index])",
        OF_FIGURES,
    ),
    # ---- What the log must say ----
    python(
        "attention by data parallelism need not gather by llm_comm",
        ENGINE_LOGS,
        "if settings.data_parallel_attention and not parts:",
        "if False:",
        OF_FIGURES,
    ),
    python(
        "norms of queries cost nothing",
        FREE_NORMS,
        "if residual is None else (x, residual)",
        "if residual is not None else (x, residual)",
        "tests/serving/test_bench_plugins.py",
    ),
)
