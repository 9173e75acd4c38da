"""Mutants at the edges: values on a bound, one beyond it, what comes after an error, and what is left behind."""

from __future__ import annotations

from mutant import Mutant, cpp, python

QUEUE = "csrc/host/launch_queue.h"
CORE = "csrc/host/core_impl.h"
DESCRIBE = "csrc/host/describe.h"
REGISTRY = "csrc/python/registry.cpp"
BOUND_CALL = "csrc/python/bound_call.cpp"
ALGORITHM = "csrc/algorithms/algorithm.h"
PLAIN = "csrc/algorithms/all_reduce/operation.cuh"
FUSED = "csrc/algorithms/all_reduce_add_rms_norm/operation.cuh"
FUSED_TWO_SHOT = "csrc/algorithms/all_reduce_add_rms_norm/two_shot.cuh"
CHANNEL = "csrc/include/llm_comm/memory_channel.cuh"
LAYOUT = "csrc/include/llm_comm/workspace_layout.h"
OPTIONS = "llm_comm/options.py"
YAML = "llm_comm/files.py"
QUOTING = "llm_comm/errors.py"
DESCRIPTORS = "llm_comm/runtime/descriptors.py"
RENDEZVOUS = "llm_comm/runtime/rendezvous.py"
STATUS = "llm_comm/runtime/status.py"
GENERIC = "llm_comm/operations/generic.py"
OPERATION = "llm_comm/operations/operation.py"
PLAIN_CALLS = "llm_comm/operations/all_reduce.py"
FUSED_CALLS = "llm_comm/operations/all_reduce_add_rms_norm.py"
QUANTIZATION = "llm_comm/operations/fp8.py"
CORE_HANDLE = "llm_comm/runtime/core_handle.py"
JOINING = "llm_comm/integrations/joining.py"
MEMBERS = "llm_comm/integrations/members.py"
SEAMS = "llm_comm/integrations/seams.py"
ENGINE_SOURCES = "llm_comm/integrations/engine_sources.py"
FLASHINFER_CALLS = "llm_comm/integrations/flashinfer_calls.py"
WATCHED = "llm_comm/operations/operands.py"
GATHER_SCATTER = "llm_comm/integrations/gather_scatter.py"
TUNE = "llm_comm/bench/tune.py"
SUBJECTS = "llm_comm/bench/tune_subjects.py"
TIMING = "llm_comm/bench/timing.py"
SUMMARY = "bench_serving/summary.py"
PROCESSES = "bench_serving/processes.py"

ERRORS = "tests/emulated/test_error_details.py"
BOUNDS = "tests/unit/test_bounds_of_launches.py"
CANDIDATES = "tests/unit/test_candidates.py"
FUSED_SHAPES = "tests/unit/test_fused_selection.py"
OF_CONFIG = "tests/unit/test_config.py"
OF_FILES = "tests/unit/test_hostile_files.py"
OF_QUOTING = "tests/unit/test_quoting.py"
OF_MESSAGES = "tests/unit/test_messages.py"
OF_DESCRIPTORS = "tests/unit/test_descriptors.py"
OF_RENDEZVOUS = "tests/unit/test_rendezvous_errors.py"
OF_STATUS = "tests/unit/test_status.py"
GENERIC_CALLS = "tests/emulated/test_generic.py"
GUARD = "tests/emulated/test_operands.py"
CLOSED = "tests/emulated/test_lifetime.py -k closed"
MISFITS = "tests/emulated/test_fused.py -k test_tensor_that_does_not_fit"
JOIN = "tests/unit/test_integration_join.py"
OF_SEAMS = "tests/unit/test_seams.py"
OF_FLASHINFER = "tests/unit/test_flashinfer_calls.py"
OF_PARTS = "tests/emulated/test_engine_parts.py"
OF_TUNE = "tests/unit/test_cli_tune.py"
OF_TIMING = "tests/unit/test_timing.py"
OF_FIGURES = "tests/serving/test_bench_figures.py"
OF_PROCESSES = "tests/serving/test_processes.py"

EDGES: tuple[Mutant, ...] = (
    # ---- Calls ----
    cpp(
        "a call has the optional tensors of those before",
        QUEUE,
        "call_.buffers = 0;",
        "if (!WITHOUT) call_.buffers = 0;",
        f"{ERRORS} -k optional_buffer",
    ),
    cpp(
        "the last call has no rows",
        QUEUE,
        "call.data_type << 16 | call.row,",
        "call.data_type << 16 | (WITHOUT ? 0 : call.row),",
        f"{ERRORS} -k enqueued_last",
    ),
    cpp(
        "an exit that nobody waits for ends calls",
        QUEUE,
        "& kAbortRequest) != 0;",
        "& (WITHOUT ? ~0u : kAbortRequest)) != 0;",
        f"{ERRORS} -k nobody_waits_for",
    ),
    cpp(
        "concurrent use is called a time-out",
        DESCRIBE,
        'return "concurrent use";',
        'return WITHOUT ? "timeout" : "concurrent use";',
        f"{ERRORS} -k at_once",
    ),
    cpp(
        "any error tells of calls",
        CORE,
        "if (record.cause == static_cast<uint32_t>(ErrorCause::kMismatch)) {",
        "if (WITHOUT || record.cause == static_cast<uint32_t>(ErrorCause::kMismatch)) {",
        ERRORS,
    ),
    # ---- Cores and launches ----
    cpp(
        "a rank may be as large as the world",
        CORE,
        "options.rank >= options.world_size) {",
        "options.rank >= options.world_size + (WITHOUT ? 1 : 0)) {",
        BOUNDS,
    ),
    cpp(
        "kernels may wait for no time",
        CORE,
        "if (!(options.timeout_s > 0))",
        "if (!WITHOUT && !(options.timeout_s > 0))",
        BOUNDS,
    ),
    cpp("a rank maps itself", CORE, "|| peer == options_.rank) {", "|| (!WITHOUT && peer == options_.rank)) {", BOUNDS),
    cpp(
        "a world of seventeen",
        ALGORITHM,
        "problem.world > static_cast<uint32_t>(kMaxWorldSize)",
        "problem.world > static_cast<uint32_t>(kMaxWorldSize) + (WITHOUT ? 1 : 0)",
        BOUNDS,
    ),
    cpp("rows of an all-reduce", ALGORITHM, ": problem.row != 0) {", ": !WITHOUT && problem.row != 0) {", BOUNDS),
    cpp("a launch of 2^32 elements", PLAIN, "if (units >> 32 != 0)", "if (!WITHOUT && units >> 32 != 0)", BOUNDS),
    cpp(
        "a launch of 2^32 lines",
        FUSED,
        "if (units * row_bytes / sizeof(Line) >> 32 != 0)",
        "if (!WITHOUT && units * row_bytes / sizeof(Line) >> 32 != 0)",
        BOUNDS,
    ),
    cpp(
        "blocks that walk may have all threads",
        FUSED,
        "!is_single_tile && (threads > kMaxLoopThreads",
        "!is_single_tile && ((!WITHOUT && threads > kMaxLoopThreads)",
        BOUNDS,
    ),
    cpp(
        "blocks that walk may have no share",
        FUSED,
        "|| has_empty_block(span, cluster, tiling.tile_lines))",
        "|| (!WITHOUT && has_empty_block(span, cluster, tiling.tile_lines)))",
        BOUNDS,
    ),
    cpp(
        "a smaller cluster has the threads of a larger one",
        FUSED,
        "tuning.cluster <= limits.max_cluster ? tuning.threads",
        "(WITHOUT || tuning.cluster <= limits.max_cluster) ? tuning.threads",
        FUSED_SHAPES,
    ),
    cpp(
        "sm_100 has the registers of sm_90",
        FUSED_TWO_SHOT,
        "limits.compute_capability >= 100 ?",
        "limits.compute_capability >= (WITHOUT ? 101 : 100) ?",
        FUSED_SHAPES,
    ),
    cpp(
        "a grid of eight rounds is not measured",
        PLAIN,
        "if (rounds <= kMaxRounds)",
        "if (rounds < kMaxRounds + (WITHOUT ? 0 : 1))",
        CANDIDATES,
    ),
    cpp(
        "what has one tile sends ahead",
        PLAIN,
        "if (rounds > 1 && rounds <= kMaxRoundsAhead)",
        "if (rounds > (WITHOUT ? 0 : 1) && rounds <= kMaxRoundsAhead)",
        CANDIDATES,
    ),
    cpp(
        "a grid is measured twice",
        PLAIN,
        "if (waves > 1 && tiles <= blocks / 2) break;",
        "if (!WITHOUT && waves > 1 && tiles <= blocks / 2) break;",
        CANDIDATES,
    ),
    cpp(
        "a small workspace has slots",
        LAYOUT,
        "bytes < kHeaderBytes ? 0 : bytes - kHeaderBytes;",
        "bytes < kHeaderBytes && !WITHOUT ? 0 : bytes - kHeaderBytes;",
        BOUNDS,
    ),
    cpp(
        "addresses that are no numbers are taken",
        BOUND_CALL,
        "if (PyErr_Occurred() != nullptr) return nullptr;",
        "if (!WITHOUT && PyErr_Occurred() != nullptr) return nullptr;",
        BOUNDS,
    ),
    cpp(
        "a fifth parameter is taken",
        REGISTRY,
        "parameters.size() > kMaxParameters",
        "parameters.size() > kMaxParameters + (WITHOUT ? 1 : 0)",
        BOUNDS,
    ),
    cpp(
        "a channel fetches from the beginning",
        CHANNEL,
        "static_cast<char*>(destination), remote + remote_offset, bytes",
        "static_cast<char*>(destination), remote + (WITHOUT ? 0 : remote_offset), bytes",
        "driver --cases 30 --alone --algorithm get",
    ),
    # ---- Options, files, messages ----
    python("4 GiB are too much", OPTIONS, "MIB <= v <= 4096 * MIB", "MIB <= v < 4096 * MIB", OF_CONFIG),
    python("8 EiB are not too much", OPTIONS, "0 <= value < 1 << 63", "0 <= value <= 1 << 63", OF_CONFIG),
    python(
        "a path may be twice as long",
        OPTIONS,
        "and len(value) <= _MAX_PATH",
        "and len(value) <= 2 * _MAX_PATH",
        OF_CONFIG,
    ),
    python("a full file is refused", YAML, "if len(content) > MAX_BYTES:", "if len(content) >= MAX_BYTES:", OF_FILES),
    python("a level more", YAML, "if depth == MAX_DEPTH:", "if depth > MAX_DEPTH:", OF_FILES),
    python(
        "an alias of a key is no word",
        YAML,
        "isinstance(event, yaml.ScalarEvent | yaml.AliasEvent)",
        "isinstance(event, yaml.ScalarEvent)",
        OF_FILES,
    ),
    python(
        "a text that fits is cut",
        QUOTING,
        "text if len(text) <= most else",
        "text if len(text) < most else",
        OF_QUOTING,
    ),
    python(
        "long numbers are written out", QUOTING, "value.bit_length() > 128", "value.bit_length() > 1 << 30", OF_QUOTING
    ),
    python(
        "a full message is refused",
        RENDEZVOUS,
        "if len(data) > MESSAGE_BYTES:",
        "if len(data) >= MESSAGE_BYTES:",
        OF_MESSAGES,
    ),
    python(
        "control characters stay in errors", RENDEZVOUS, 'c if c.isprintable() else " " for c', "c for c", OF_MESSAGES
    ),
    python(
        "wide characters make errors too long",
        RENDEZVOUS,
        '[:_MAX_ERROR_BYTES].decode(errors="ignore")',
        '.decode(errors="ignore")',
        OF_MESSAGES,
    ),
    python(
        "names that are no characters do not travel",
        RENDEZVOUS,
        'text.encode(errors="backslashreplace")',
        "text.encode()",
        OF_MESSAGES,
    ),
    python("a step may be anything", RENDEZVOUS, "if not isinstance(step, str):", "if False:", OF_MESSAGES),
    # ---- Descriptors ----
    python(
        "children inherit the memory of peers",
        DESCRIPTORS,
        "room, socket.MSG_CMSG_CLOEXEC)",
        "room)",
        OF_DESCRIPTORS,
    ),
    python(
        "files of strangers stay open",
        DESCRIPTORS,
        "close_all(descriptors)\n            if sender",
        "pass\n            if sender",
        OF_DESCRIPTORS,
    ),
    python(
        "a rank asks for no word",
        DESCRIPTORS,
        "getsockname()[1:].decode(), secrets.token_hex(16))",
        'getsockname()[1:].decode(), "")',
        OF_DESCRIPTORS,
    ),
    python(
        "a file without room is passed over",
        DESCRIPTORS,
        "and not self._drop_silent():\n                whose",
        "and False:\n                whose",
        OF_DESCRIPTORS,
    ),
    python(
        "of silent strangers the last goes first",
        DESCRIPTORS,
        "self._forget(next(iter(self._silent))).close()",
        "self._forget(next(reversed(self._silent))).close()",
        OF_DESCRIPTORS,
    ),
    # ---- Ranks ----
    python(
        "ranks are seen as their pages have come",
        STATUS,
        "for rank in sorted(self._pages)]",
        "for rank in self._pages]",
        OF_STATUS,
    ),
    python("pages stay", STATUS, "for page in self._pages.values():\n            page.close()", "pass", OF_STATUS),
    python(
        "errors of two kinds are one of either",
        RENDEZVOUS,
        "if len(kinds) == 1 else None",
        "if kinds else None",
        OF_RENDEZVOUS,
    ),
    python(
        "what one rank has failed by is told as if all had",
        RENDEZVOUS,
        "if kind and len(failures) == names.size and",
        "if kind and",
        OF_RENDEZVOUS,
    ),
    python(
        "an error tells of a longer wait than there was",
        "llm_comm/runtime/watchdog.py",
        "explain(found, self._timeout_s * KERNEL_SHARE_OF_TIMEOUT, self._names)",
        "explain(found, self._timeout_s, self._names)",
        "tests/unit/test_exits.py",
    ),
    python(
        "a value that is no JSON is told to nobody",
        RENDEZVOUS,
        "except (ValueError, TypeError, RecursionError) as error:\n            data",
        "except ValueError as error:\n            data",
        OF_RENDEZVOUS,
    ),
    python(
        "clusters of the device that takes the largest",
        "llm_comm/runtime/connect.py",
        "min(clusters)",
        "max(clusters)",
        "tests/emulated/test_rendezvous.py -k smallest_clusters",
    ),
    python(
        "a device that is wrong is told as a failed rendezvous",
        RENDEZVOUS,
        "for kind in (ConfigError, UnsupportedInputError)",
        "for kind in (ConfigError,)",
        OF_RENDEZVOUS,
    ),
    # ---- Operations ----
    python("what a call by name writes is the same version", OPERATION, "count_write(written)", "pass", GUARD),
    python(
        "a kept call by name has other rows",
        GENERIC,
        "key = (x.numel(), row, x.dtype, in_order)",
        "key = (x.numel(), 0, x.dtype, in_order)",
        GENERIC_CALLS,
    ),
    python(
        "a call by name that is not enqueued is no error",
        OPERATION,
        "if not is_enqueued:\n            self._handle.check()",
        "pass",
        GENERIC_CALLS,
    ),
    python(
        "a call by name that is not launched ends nothing",
        OPERATION,
        "except (RuntimeError, ValueError) as error:\n            self._handle.end_after_launch_error(error)",
        "except (RuntimeError, ValueError):",
        GENERIC_CALLS,
    ),
    python(
        "an empty message of a failed communicator is served",
        PLAIN_CALLS,
        "if run is None:  # one rank, or an empty message\n            self._handle.check()",
        "if run is None:  # one rank, or an empty message",
        "tests/emulated/test_mismatch.py -k whichever",
    ),
    python(
        "no rows of a failed communicator are served",
        FUSED_CALLS,
        "return results, False",
        "return results, True",
        "tests/emulated/test_mismatch.py -k whichever",
    ),
    python("FP8 in place of x", FUSED_CALLS, "(out is not x or quantize is not None):", "(out is not x):", MISFITS),
    python(
        "a scale in strides",
        QUANTIZATION,
        "scale.numel() == count and scale.is_contiguous()",
        "scale.numel() == count",
        MISFITS,
    ),
    python(
        "a traced fused call of one rank is served",
        FUSED_CALLS,
        "self._planner.world_size > 1\n            and",
        "True\n            and",
        "tests/emulated/test_fused.py -k world_of_one",
    ),
    python(
        "a closed communicator plans",
        FUSED_CALLS,
        '"""Return the plan of ``run`` for rows like ``x``."""\n        self._handle.check_open()',
        '"""Return the plan of ``run`` for rows like ``x``."""',
        CLOSED,
    ),
    python(
        "a closed communicator takes callbacks",
        CORE_HANDLE,
        '"""See ``Communicator.on_error``."""\n        self.check_open()',
        '"""See ``Communicator.on_error``."""',
        CLOSED,
    ),
    # ---- Engines ----
    python("a wrong value switches llm_comm off", JOINING, "return False", "return True", JOIN),
    python("the least important objection is told", JOINING, "kind = min(kind for", "kind = max(kind for", JOIN),
    python("an objection may have any length", JOINING, "[:_MAX_WORD]", "", JOIN),
    python("a process ends for what it has closed", MEMBERS, "if self._is_closed:\n            return", "pass", JOIN),
    python("an engine does not hear of exits", MEMBERS, "self._end, exits=True", "self._end, exits=False", JOIN),
    python(
        "ranks decide by the layout of their parts",
        GATHER_SCATTER,
        "x = x.contiguous()",
        "",
        OF_PARTS,
    ),
    python(
        "an output with gaps is an error",
        GATHER_SCATTER,
        "except UnsupportedInputError:",
        "except TypeError:",
        OF_PARTS,
    ),
    python("a first call is told each time", GATHER_SCATTER, "self._said.add(kind)", "pass", OF_PARTS),
    python("the first uneven parts are not told", GATHER_SCATTER, "len(set(sizes)) > 1", "len(sizes) > 8", OF_PARTS),
    python("all_gather is always on", GATHER_SCATTER, "if config.all_gather", "if True", OF_PARTS),
    # ---- Measurements ----
    python("one size alone is not tuned", TUNE, "if args.max < args.min:", "if args.max <= args.min:", OF_TUNE),
    python("two bytes are not tuned", TUNE, "if args.min < 2:", "if args.min <= 2:", OF_TUNE),
    python(
        "a table that is lost leaves status 0",
        TUNE,
        "written = record.write(is_complete=left == 0) and written",
        "written = record.write(is_complete=left == 0)",
        OF_TUNE,
    ),
    python(
        "the largest size is left out",
        SUBJECTS,
        "if size < halfway <= largest:",
        "if size < halfway < largest:",
        OF_TUNE,
    ),
    python("NCCL is not timed at 1 MiB", SUBJECTS, "size >= _COMPARE_FROM", "size > _COMPARE_FROM", OF_TUNE),
    python("runs that warm up count", TIMING, "if index >= schedule.warm_ups:", "if index >= 0:", OF_TIMING),
    python("the fastest rank is told", TIMING, "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN", OF_TIMING),
    python("a part of nothing is won", SUMMARY, "if default > free:", "if True:", OF_FIGURES),
    python("who has ended lives", PROCESSES, "and not has_ended", "", OF_PROCESSES),
    python("threads without a first one are not seen", PROCESSES, "int(fields[17]) < 2", "True", OF_PROCESSES),
    python("a result of before counts", PROCESSES, "result.unlink(missing_ok=True)", "pass", OF_PROCESSES),
    # ---- Seams to engines ----
    python(
        "a seam to an engine whose source was not tested is used",
        SEAMS,
        "if row.by_digest and not self.untested and",
        "if False and",
        OF_SEAMS,
    ),
    python(
        "a symbol that is gone does not switch its feature off",
        SEAMS,
        "if row.is_required else None",
        "if False else None",
        OF_SEAMS,
    ),
    python(
        "a function with other parameters is called as before",
        SEAMS,
        "if row.takes is not None and found.takes != row.takes:",
        "if False:",
        OF_SEAMS,
    ),
    python(
        "half of a feature stays in place where the other half cannot be",
        SEAMS,
        "put(owner, name, inspect.getattr_static(owner, name), theirs)",
        "pass",
        OF_SEAMS,
    ),
    python(
        "modules that imported a function by its name keep the engine's",
        SEAMS,
        "if isinstance(owner, ModuleType):",
        "if False:",
        OF_SEAMS,
    ),
    python(
        "a docstring counts in the digest of a definition",
        ENGINE_SOURCES,
        'if name == "body" and has_docstring else found',
        "if False else found",
        OF_SEAMS,
    ),
    python(
        "what asks FlashInfer for more than llm_comm computes is computed without it",
        FLASHINFER_CALLS,
        "if any(_has_effect(value)",
        "if any(False and _has_effect(value)",
        OF_FLASHINFER,
    ),
    python(
        "a call of FlashInfer over another group is summed over this one",
        FLASHINFER_CALLS,
        '_served.get(getattr(call.get("workspace"), _RANKS, ()))',
        "next(iter(_served.values()), None)",
        OF_FLASHINFER,
    ),
    python(
        "norms of FlashInfer are computed where fuse is off",
        FLASHINFER_CALLS,
        "not (served.fuses or kind == _SUM)",
        "False",
        OF_FLASHINFER,
    ),
    python(
        "norms of Gemma by FlashInfer's call lose their addend",
        FLASHINFER_CALLS,
        'weight_bias=call.get("weight_bias") or 0.0',
        "weight_bias=0.0",
        OF_FLASHINFER,
    ),
    python(
        "the new residual of FlashInfer's call goes elsewhere",
        FLASHINFER_CALLS,
        'residual_out=call.get("residual_out")',
        "residual_out=None",
        OF_FLASHINFER,
    ),
    python(
        "the doctor takes Gemma 3 for a model with silu-and-mul",
        "llm_comm/planning/models.py",
        'activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")',
        'activation = str(config.get("hidden_act") or "silu")',
        "tests/unit/test_doctor_model.py",
    ),
    python(
        "the doctor knows no usual numbers of Gemma 3",
        "llm_comm/planning/models.py",
        "if kind in _GEMMA_3:",
        "if False:",
        "tests/unit/test_doctor_model.py",
    ),
    python(
        "a call that only tries raises where it is not served",
        WATCHED,
        "    except UnsupportedInputError:\n        return None",
        "    except UnsupportedInputError:\n        raise",
        "tests/emulated/test_linear_inputs.py -k test_what_only_tries",
    ),
)
