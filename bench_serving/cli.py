"""Command line of ``python -m bench_serving``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_serving import checks, profile, report
from bench_serving.arms import ARMS
from bench_serving.comparison import Comparison
from bench_serving.settings import FLASHINFER_OPTION, SHAPES, Settings

ENGINES = ("vllm", "sglang")
#: Arms that change no switch of the engine beyond llm_comm.
AS_DEPLOYED = ("default", "llm_comm")
_USUAL_ARMS = tuple(arm.name for arm in ARMS.values() if arm.by_default)
#: Token ids that ``vllm bench latency`` draws from, whatever the model.
_IDS_OF_BENCH_LATENCY = 10000


def parser() -> argparse.ArgumentParser:
    shapes = ", ".join(sorted(path.parent.name for path in SHAPES.glob("*/config.json")))
    options = argparse.ArgumentParser(
        prog="python -m bench_serving",
        description="Compares decode latency in a real engine with all-reduces done by NCCL, by the engine itself and "
        "by llm_comm, with random weights. Each run is a fresh start of the engine.",
    )
    options.add_argument("--engine", choices=ENGINES, default="vllm", help="(%(default)s)")
    options.add_argument(
        "--mode",
        choices=("latency", "serve", "bench-latency", "check"),
        default="latency",
        help="latency: the engine in its own process (default); serve: a server, timed by the engine's own serving "
        "benchmark; bench-latency: vllm bench latency, slow; check: no times, only --check or --deterministic",
    )
    options.add_argument(
        "--model", default="llama-2-70b", help=f"a directory with a config.json, or one of: {shapes} (%(default)s)"
    )
    options.add_argument("--layers", type=_positive, metavar="N", help="shorten the model, to try things out")
    options.add_argument("--tensor-parallel-size", "--tp", type=_positive, default=8, metavar="N", help="(%(default)s)")
    options.add_argument("--arms", type=_arms, metavar="A,B", help=f"of {', '.join(ARMS)} ({','.join(_USUAL_ARMS)})")
    options.add_argument("--batch-sizes", type=_sizes, default=(1, 4, 16, 64), metavar="N,N", help="(1,4,16,64)")
    options.add_argument("--prompt-tokens", type=_positive, default=128, metavar="N", help="(%(default)s)")
    options.add_argument("--output-tokens", type=_positive, default=136, metavar="N", help="(%(default)s)")
    options.add_argument(
        "--iterations", type=_positive, default=2, metavar="N", help="timed batches of each size (%(default)s)"
    )
    options.add_argument(
        "--prefill-tokens",
        type=_lengths,
        default=(4096,),
        metavar="N,N",
        help="time prefills of so many tokens; 0: of none. Engines' own benchmarks never do (4096)",
    )
    options.add_argument(
        "--prefill-iterations",
        type=_positive,
        default=6,
        metavar="N",
        help="timed prefills of each length (%(default)s)",
    )
    options.add_argument("--repeats", type=_positive, default=2, metavar="N", help="starts of each arm (%(default)s)")
    options.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    options.add_argument(
        "--check",
        action="store_true",
        help="also compare tokens over the repeats and logits with nccl's (scaled weights)",
    )
    options.add_argument(
        "--deterministic",
        action="store_true",
        help="the engine's batch-invariant mode in all arms; also compare tokens over batch sizes and starts (scaled "
        "weights)",
    )
    options.add_argument(
        "--as-deployed",
        action="store_true",
        help="change no switch of the engine: NVLink multicast, FlashInfer and the kernels of attention stay as they "
        "are here, with your --engine-option; arms default and llm_comm. The code paths of both are printed",
    )
    options.add_argument(
        "--weights",
        choices=("dummy", "scaled"),
        help="dummy: the engine's own (default); scaled: as large as a trained model's, other ones on each rank",
    )
    options.add_argument(
        "--engine-option",
        type=_engine_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further argument of vllm.LLM or sglang.Engine, in all arms; the value is JSON or text",
    )
    options.add_argument(
        "--profile",
        action="store_true",
        help="after the times, record the kernels of some decode steps and prefills on ranks 0 and 1",
    )
    options.add_argument("--seed", type=int, default=0, help="of the prompts")
    options.add_argument(
        "--timeout",
        type=float,
        default=300,
        metavar="S",
        help="of each run, start of the engine included (%(default)g)",
    )
    options.add_argument(
        "--out",
        type=Path,
        default=Path("bench_serving_results"),
        metavar="DIR",
        help="for all that it writes (%(default)s)",
    )
    options.add_argument(
        "--resume", action="store_true", help="keep the runs that are complete in --out and do the rest"
    )
    options.add_argument("--commit", help="of llm_comm, for the report, where git cannot tell")
    return options


def _natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least {least}")
    return int(text)


def _positive(text: str) -> int:
    return _natural(text, 1)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(part) for part in text.split(",")))


def _lengths(text: str) -> tuple[int, ...]:
    lengths = dict.fromkeys(_natural(part) for part in text.split(","))
    return tuple(length for length in lengths if length)


def _arms(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown arm {unknown[0]!r}; valid: {', '.join(ARMS)}")
    return names


def _engine_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, e.g. attention_backend=triton")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def arms_of(options: argparse.Namespace) -> list[str]:
    """Return the names of the arms for command line options.

    Raises:
        SystemExit: An arm changes a switch of the engine, against ``--as-deployed``.
    """
    if not options.as_deployed:
        return options.arms or list(_USUAL_ARMS)
    others = [name for name in options.arms or () if name not in AS_DEPLOYED]
    if others:
        raise SystemExit(f"--as-deployed takes the arms {' and '.join(AS_DEPLOYED)}: {others[0]} changes switches")
    return options.arms or list(AS_DEPLOYED)


def _show_paths(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print the log lines of each arm's first start that say which code paths it took."""
    for arm in dict.fromkeys(run["arm"] for run in runs):
        print(f"\ncode paths of {arm}, by the log of its first start:")
        print(*(f"  {line}" for line in next(run for run in runs if run["arm"] == arm)["evidence"]), sep="\n")


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of a run for command line options.

    Raises:
        SystemExit: The options contradict each other, or the model does not exist.
    """
    check = options.check or (options.mode == "check" and not options.deterministic)
    model = SHAPES / options.model if (SHAPES / options.model).is_dir() else Path(options.model)
    if not (model / "config.json").is_file():
        raise SystemExit(f"--model {options.model}: neither a known shape nor a directory with a config.json")
    if (check or options.deterministic) and options.weights == "dummy":
        raise SystemExit(
            f"{'--check' if check else '--deterministic'} needs --weights scaled: the engine's dummy weights are the "
            "same on all ranks and so small that an all-reduce hardly shows in the logits"
        )
    by_the_engine = options.mode in ("serve", "bench-latency")
    if by_the_engine and (check or options.deterministic or options.weights == "scaled"):
        raise SystemExit(
            f"--mode {options.mode} takes neither --check nor --deterministic nor --weights scaled: use --mode latency "
            "or check"
        )
    if options.mode == "bench-latency" and options.engine != "vllm":
        raise SystemExit(
            "--mode bench-latency is vLLM's; SGLang's bench_one_batch loads no plugins, so it has no such arm"
        )
    backend = dict(options.engine_option).get(FLASHINFER_OPTION)
    if not options.as_deployed and backend not in (None, "trtllm"):
        raise SystemExit(
            f"--engine-option {FLASHINFER_OPTION}={backend}: must be trtllm; the other backends use NVLink multicast, "
            "which is off in all arms"
        )
    if options.output_tokens < 2:
        raise SystemExit("--output-tokens must be at least 2: decoding begins with the second token")
    if options.profile and (options.mode != "latency" or options.output_tokens < profile.FEWEST_TOKENS):
        raise SystemExit(f"--profile needs --mode latency and --output-tokens {profile.FEWEST_TOKENS} or more")
    settings = Settings(
        engine=options.engine,
        model=str(model.resolve()),
        layers=options.layers,
        tensor_parallel_size=options.tensor_parallel_size,
        batch_sizes=options.batch_sizes,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        iterations=options.iterations,
        prefill_tokens=() if by_the_engine else options.prefill_tokens,
        prefill_iterations=options.prefill_iterations,
        enforce_eager=options.enforce_eager,
        weights=options.weights or ("scaled" if check or options.deterministic else "dummy"),
        engine_options=dict(options.engine_option),
        mode=options.mode,
        check=check,
        deterministic=options.deterministic,
        as_deployed=options.as_deployed,
        profile=options.profile,
        seed=options.seed,
    )
    _check_model(settings, options.model, arms_of(options))
    return settings


def _check_model(settings: Settings, name: str, arms: Sequence[str]) -> None:
    config = settings.config()
    for needed in ("vocab_size", "max_position_embeddings"):
        if needed not in config:
            raise SystemExit(f"--model {name}: its config.json has no {needed}; only language models are served")
    if settings.mode == "bench-latency" and config["vocab_size"] < _IDS_OF_BENCH_LATENCY:
        raise SystemExit(
            f"--mode bench-latency draws token ids below {_IDS_OF_BENCH_LATENCY}, and the vocabulary of {name} has "
            f"{config['vocab_size']}"
        )
    most = checks.most_layers(config, checks.wire(os.environ, arms))
    layers = settings.layers or config.get("num_hidden_layers", 0)
    if settings.check and most is not None and layers > most:
        raise SystemExit(
            f"--check of {name}, in fp8, with experts or with quantized sums: over {layers} layers rounding alone "
            f"moves its logits too far to judge sums by them; cut it with --layers {most}"
        )


def check_place(engine: str, out: Path) -> None:
    """Create the directory for results. A failure here would otherwise occur in each run, after minutes.

    Raises:
        SystemExit: The engine is not installed, or the directory is not writable.
    """
    if importlib.util.find_spec(engine) is None:
        raise SystemExit(
            f"--engine {engine}: {sys.executable} has no package {engine}: install it there, or run bench_serving with "
            "the Python that has it"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SystemExit(
            f"--out {out}: nothing can be written there ({error.strerror}): name another directory"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and show it. Return 0 if every run succeeded and the checks, if any, passed."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
    settings = settings_of(options)
    out: Path = options.out.resolve()
    check_place(settings.engine, out)
    content = Comparison(
        settings,
        arms_of(options),
        options.repeats,
        options.timeout,
        out,
        shlex.join(["python", "-m", "bench_serving", *argv]),
        options.commit,
        options.resume,
    ).run()
    print()
    report.show(out / "report.json")
    if settings.profile:
        print("\n" + profile.text(content))
    if settings.as_deployed:
        _show_paths(content["runs"])
    print(f"\n{out / 'report.json'}")
    failed = any(run["failure"] for run in content["runs"])
    passed = all(content[check].get("passed", True) for check in ("check", "invariance"))
    return 1 if failed or not passed else 0
