"""Command ``llm-comm``: parses the command line and calls the module that implements the command.

Exit status: 0 success, 1 a run or one of its checks failed, 2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import argparse
import logging
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_comm.bench import ALIGNED_METHODS, LAYER_TOKENS, METHODS, OPERATIONS, PLOT_SUFFIXES
from llm_comm.errors import ConfigError, LlmCommError, guess
from llm_comm.installation import VERSION
from llm_comm.options import parse_option, parse_size

_BENCH_MODES = ("eager", "graph")
_ALIGNED_AND_SPACED = (
    "aligned: the ranks start together on the GPU, which times the kernel; spaced: so too, with a linear layer before "
    "each call as in a model, whose time is taken off"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. ``argv`` defaults to the process's arguments. Return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {_with_guesses(unknown, args.parser)}")
    args.argv = argv
    _show_log()
    try:
        # Imported on use, so that each command needs only its own dependencies.
        return int(pkgutil.resolve_name(args.runs)(args))
    except LlmCommError as error:
        print(f"{_speaker()}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _show_log() -> None:
    """Write llm_comm's log to stderr. Python by default drops everything below a warning."""
    logger = logging.getLogger("llm_comm")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{_speaker()}: %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def _with_guesses(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    options = [option for action in parser._actions for option in action.option_strings]
    guesses = [guess(word.partition("=")[0], options) if word.startswith("-") else "" for word in unknown]
    return " ".join(word + guessed for word, guessed in zip(unknown, guesses, strict=True))


def _speaker() -> str:
    from llm_comm.cli import launch

    return f"llm-comm, rank {launch.rank()}" if launch.in_rank() else "llm-comm"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all subcommands.

    A parse yields ``runs``, the ``module:function`` that implements the command and returns the exit status, and
    ``parser``, the parser of the subcommand.
    """
    parser = argparse.ArgumentParser(prog="llm-comm", description="Low-latency tensor-parallel collectives.")
    parser.add_argument("--version", action="version", version=f"llm-comm {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    _add_tune(commands)
    _add_algorithms(commands)
    _add_check(commands)
    _add_doctor(commands)
    _add_nccl_path(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, runs: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=_sentence(text))
    parser.set_defaults(runs=runs, parser=parser)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "decode with a small tensor-parallel Llama and check it against an unsharded run"
    parser = _command(commands, "demo", text, "llm_comm.demo.run:run")
    _add_ranks(parser)
    parser.add_argument("--tokens", type=_positive, default=256, help="tokens to generate per sequence (%(default)s)")
    parser.add_argument("--batch", type=_positive, default=1, help="sequences decoded together (%(default)s)")
    parser.add_argument("--prompt-len", type=_positive, default=16, help="prompt length in tokens (%(default)s)")
    parser.add_argument("--hidden", type=_positive, default=1024, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=_positive, default=4, help="layers (%(default)s)")
    parser.add_argument("--heads", type=_positive, default=16, help="attention heads (%(default)s)")
    parser.add_argument("--kv-heads", type=_positive, default=8, help="key/value heads (%(default)s)")
    parser.add_argument("--intermediate", type=_positive, help="MLP size (2.75 x hidden)")
    parser.add_argument("--vocab", type=_positive, default=2048, help="vocabulary size (%(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="bf16 on GPUs, fp32 on emulated ones")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and prompts (%(default)s)")
    parser.add_argument("--timeout-s", type=_seconds, help="longest wait for a peer, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="time a collective beside other libraries")
    collectives = bench.add_subparsers(title="collectives", required=True, metavar="COLLECTIVE")
    text = "time and check all-reduce + residual add + RMSNorm in one kernel beside the same in two, and FlashInfer"
    parser = _command(collectives, "fused", text, "llm_comm.bench.fused:run")
    parser.add_argument("--min", type=byte_count, help="smallest message (16K, or a row if that is longer)")
    parser.add_argument("--max", type=byte_count, help="largest message (1M; emulated 64K)")
    parser.add_argument("--hidden", type=_positive, default=8192, help="elements of a row (%(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="(%(default)s)")
    _add_bench_options(parser, "graph")
    text = "time and check all-reduce beside NCCL and torch symmetric memory (beside gloo on emulated GPUs)"
    _add_comparison(collectives, "all-reduce", text, "message")
    text = "the same of all-gather, into ordinary and into symmetric memory"
    _add_comparison(collectives, "all-gather", text, "part of a rank")
    _add_comparison(collectives, "reduce-scatter", "the same of reduce-scatter", "part of a rank")
    _add_comparison(collectives, "all-to-all", "the same of all-to-all", "part of a rank")
    _add_linear(collectives)
    text = "time what the tuning table chooses beside all candidates, and mark where one is 5 percent faster"
    parser = _command(collectives, "table", text, "llm_comm.bench.table:run")
    _add_candidates(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")


def _add_linear(collectives: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = (
        "time and check linear layers beside cuBLAS; of few tokens from 2 ranks on also layer + all-reduce + add + "
        "RMSNorm, beside cuBLAS with llm_comm and with NCCL"
    )
    parser = _command(collectives, "linear", text, "llm_comm.bench.linear:run")
    _add_ranks(parser, "ranks, 1 to 16 (one a GPU; without GPUs 4)")
    parser.add_argument(
        "--shapes",
        type=_shapes,
        metavar="NxK,...",
        help="outputs and inputs of a rank's layer (8192x1024,8192x3584,5120x1024,5120x3200; emulated small ones)",
    )
    parser.add_argument("--tokens", type=_numbers, metavar="M,...", help="tokens, to 4096 (1,4,16,64; emulated 1,9)")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="(%(default)s)")
    parser.add_argument(
        "--pdl",
        choices=("on", "off", "both"),
        default="both",
        help="whether llm_comm's kernels are dependent launches (%(default)s)",
    )
    parser.add_argument(
        "--silu",
        action="store_true",
        help="gate-and-up projections with silu-and-mul, N outputs each, beside cuBLAS with a kernel behind it, each "
        "rank alone (3584x8192,3200x5120)",
    )
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="row",
        choices=("row", "tensor"),
        help="layers of FP8 with a scale for each row (the default), or tensor, of x and of the weight, beside "
        "torch._scaled_mm and, where it is installed, vLLM's cutlass_scaled_mm, each rank alone",
    )
    parser.add_argument(
        "--choices",
        action="store_true",
        help="time choices of the layer's kernel too, and show the best (one rank)",
    )
    parser.add_argument(
        "--weights",
        type=byte_count,
        metavar="SIZE",
        help="weights that a chain reads, so that none is in the cache (600M; emulated those of two layers)",
    )
    parser.add_argument("--reps", type=_positive, help="timed runs, of which the median counts (20; emulated 3)")
    _add_json_and_plot(parser)


def _add_comparison(
    collectives: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, what: str
) -> None:
    parser = _command(collectives, name, text, "llm_comm.bench.collectives:run")
    parser.set_defaults(collective=name)
    parser.add_argument("--min", type=byte_count, default=byte_count("1K"), help=f"smallest {what} (1K)")
    parser.add_argument("--max", type=byte_count, help=f"largest {what} (8M; emulated 64K)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="(%(default)s)")
    _add_programs(parser, "programs of llm_comm.dsl to time too, each in a column of its own")
    _add_bench_options(parser, "both")


def _add_bench_options(parser: argparse.ArgumentParser, modes: str) -> None:
    _add_ranks(parser)
    parser.add_argument("--mode", type=_modes, help=f"eager, graph, or both: eager,graph ({modes}; emulated eager)")
    parser.add_argument("--calls", type=_positive, help="calls in one timed run (20; emulated 2)")
    parser.add_argument("--reps", type=_positive, help="timed runs, of which the median counts (20; emulated 3)")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="aligned",
        help=f"{_ALIGNED_AND_SPACED}; plain: after a host barrier, which adds launch skew (%(default)s)",
    )
    _add_json_and_plot(parser)


def _add_json_and_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument(
        "--plot",
        type=_plot_file,
        metavar="FILE.png",
        help=f"also draw them, as {_or(PLOT_SUFFIXES)} (needs matplotlib)",
    )


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "measure which algorithm is fastest at each size here and write a tuning table"
    parser = _command(commands, "tune", text, "llm_comm.bench.tune:run")
    _add_candidates(parser)
    parser.add_argument(
        "--layers",
        type=_shapes,
        default=(),
        metavar="NxK,...",
        help="linear layers of few tokens too, by outputs and inputs of a rank's weight: with what tunables, and up to "
        "how many tokens, llm_comm is faster than cuBLAS (none)",
    )
    parser.add_argument(
        "--silu-layers",
        type=_shapes,
        default=(),
        metavar="NxK,...",
        help="gate-and-up projections with silu-and-mul too, N outputs of each, beside cuBLAS and a kernel behind it "
        "(none)",
    )
    parser.add_argument(
        "--fp8-layers",
        type=_shapes,
        default=(),
        metavar="NxK,...",
        help="linear layers of FP8 too, with a scale for each row, beside torch._scaled_mm and vLLM's kernel (none)",
    )
    parser.add_argument(
        "--tokens",
        type=_numbers,
        default=LAYER_TOKENS,
        metavar="M,...",
        help=f"of layers; a row serves those between two of them too ({','.join(map(str, LAYER_TOKENS))})",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="where to write the table")
    parser.add_argument(
        "--install",
        action="store_true",
        help="write the table to your directory of tables (LLM_COMM_TABLE_DIR, or ~/.config/llm_comm/tables): every "
        "later start on such a machine finds it, without an option",
    )
    parser.add_argument(
        "--force", action="store_true", help="install also in place of a table measured later or more completely"
    )
    parser.add_argument(
        "--list", action="store_true", help="measure nothing: list the tables that are there, and which are taken here"
    )
    parser.add_argument(
        "--remove", metavar="NAME", help="measure nothing: remove an installed table, by its name in --list"
    )
    parser.add_argument(
        "--multicast",
        action="store_true",
        help="set NVLink multicast up, test it, and measure algorithms that use it too: a communicator with the table "
        "then uses it. Refused where the environment forbids it",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the time of every candidate, after each size; a run with the same options and a file that is "
        "there goes on behind it",
    )


def _add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add options for the choice of candidates, and for their timing."""
    _add_ranks(parser)
    parser.add_argument(
        "--min", type=byte_count, default=byte_count("1K"), help="smallest message; of a gather or scatter, a part (1K)"
    )
    parser.add_argument("--max", type=byte_count, default=byte_count("64M"), help="largest message, or part (64M)")
    parser.add_argument("--reps", type=_positive, default=9, help="timed runs of each good candidate (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=_positive,
        help="measure no longer than that and the size under way; few sizes of all operations come first (no limit)",
    )
    parser.add_argument(
        "--operations",
        type=_operations,
        default=OPERATIONS,
        metavar="NAME,...",
        help=f"some of {','.join(OPERATIONS)}, or none (all)",
    )
    parser.add_argument("--hidden", type=_positive, default=8192, help="elements of a row of fused (%(default)s)")
    parser.add_argument(
        "--method", choices=ALIGNED_METHODS, default="aligned", help=f"{_ALIGNED_AND_SPACED} (%(default)s)"
    )
    _add_programs(parser, "programs of llm_comm.dsl that are candidates too")


def _add_programs(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--dsl",
        type=_programs,
        metavar="MODULE:PROGRAM,...",
        help=f"{what}; in place of what option dsl (LLM_COMM_DSL) names",
    )


def _add_algorithms(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "list the operations and algorithms of this build, and programs of llm_comm.dsl"
    parser = _command(commands, "algorithms", text, "llm_comm.cli.contents:algorithms")
    _add_programs(parser, "programs to list")
    parser.add_argument("--library", action="store_true", help="list the programs of llm_comm.dsl.library too")
    _add_world_of_programs(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "check programs of llm_comm.dsl, and run their kernels under schedules of the deterministic emulator"
    parser = _command(commands, "check", text, "llm_comm.cli.contents:check")
    parser.add_argument("programs", type=_programs, metavar="MODULE:PROGRAM,...", help="programs to check")
    _add_world_of_programs(parser)
    parser.add_argument("--schedules", type=_positive, help="schedules of each program (12 to 200, by its size)")


def _add_world_of_programs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--world",
        type=_world,
        default=4,
        metavar="N",
        help="ranks that programs are built and checked for, 2 to 8 (%(default)s)",
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "report what this machine offers and what llm_comm would do with it"
    parser = _command(commands, "doctor", text, "llm_comm.cli.doctor:run")
    parser.add_argument(
        "--model",
        metavar="PATH_OR_NAME",
        help="say instead which layers and norms of a model are served, by its config.json",
    )
    parser.add_argument("--tp", type=_positive, metavar="N", default=8, help="its tensor-parallel ranks (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_nccl_path(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "print the path of the library that stands in for NCCL"
    parser = _command(commands, "nccl-path", text, "llm_comm.cli.contents:nccl_path")
    parser.add_argument("--emulated", action="store_true", help="the one over emulated GPUs, for tests")


def _add_ranks(parser: argparse.ArgumentParser, text: str = "ranks, 2 to 16 (one a GPU; without GPUs 4)") -> None:
    parser.add_argument("--world", type=_positive, metavar="N", help=text)
    parser.add_argument("--device", choices=("auto", "cuda", "emulated"), default="auto", help="(%(default)s)")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def byte_count(text: str) -> int:
    """Parse a size above 0, see ``parse_size``."""
    try:
        count = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if count == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a message has at least a byte")
    return count


def _seconds(text: str) -> float:
    return float(_option("timeout_s", text))


def _programs(text: str) -> str:
    return str(_option("dsl", text))


def _option(name: str, text: str) -> Any:
    """Parse the value of an option of ``Config``, as for its environment variable."""
    try:
        return parse_option(name, text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _world(text: str) -> int:
    from llm_comm.dsl.programs import MAX_WORLD

    world = _positive(text)
    if not 2 <= world <= MAX_WORLD:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 2 to {MAX_WORLD}")
    return world


def _plot_file(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {_or(PLOT_SUFFIXES)}: name such a file")
    return path


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    """Parse positive integers separated by commas, and drop duplicates."""
    return tuple(dict.fromkeys(_positive(number) for number in text.split(",")))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse shapes such as ``8192x1024`` (outputs x inputs), separated by commas, and drop duplicates."""
    found = [shape.lower().split("x") for shape in text.split(",")]
    if any(len(shape) != 2 for shape in found):
        raise argparse.ArgumentTypeError(f"{text!r} names no shapes: write 8192x1024,5120x3200")
    return tuple(dict.fromkeys((_positive(outputs), _positive(inputs)) for outputs, inputs in found))


def _some_of(text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    chosen = text.split(",")
    if not set(chosen) <= set(allowed):
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(allowed)}")
    return tuple(name for name in allowed if name in chosen)


def _modes(text: str) -> tuple[str, ...]:
    return _some_of(text, _BENCH_MODES)


def _operations(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    return _some_of(text, OPERATIONS)
