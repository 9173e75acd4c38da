"""Machine code of AMD GPUs for the deterministic driver: compile kernels to assembly text, plant faults in the text.

Run the code with ``deterministic --machine-code FILE``, built with ``OPTIONS``. See ``code.h``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
BUILD = REPOSITORY / "build" / "deterministic-64"
#: CMake options of a driver that runs machine code: warps of 64 threads.
OPTIONS = ("-DLLM_COMM_WARP_THREADS=64",)
#: Environment variable that names a Python with the package ``ziglang``, whose clang compiles for AMD GPUs.
PYTHON_VARIABLE = "LLM_COMM_ZIG_PYTHON"
TARGET = "gfx942"
#: Polls of a wait between two looks at the clock. The emulator's number: schedules bound how long a wait may last.
POLLS_PER_CHECK = 4


def compiler() -> Path | None:
    """Return a Python that has the package ``ziglang``, or None."""
    named = os.environ.get(PYTHON_VARIABLE)
    for python in (REPOSITORY / "build" / "amd-env" / "bin" / "python", named and Path(named), Path(sys.executable)):
        if python and python.exists():
            found = subprocess.run([python, "-c", "import ziglang"], capture_output=True, check=False)
            if found.returncode == 0:
                return python
    return None


def assembly(python: Path, algorithm: str, build: Path = BUILD) -> Path:
    """Compile the kernels of an algorithm, such as ``AllReduceOneShot``, to assembly text below ``build``.

    ``build``: a build of the driver. Its generated sources name the kernels.
    """
    where = "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'lib')"
    resources = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    generated = build / "generated"
    output = build / "gcn" / f"{algorithm}.s"
    output.parent.mkdir(exist_ok=True)
    command = [
        *(python, "-m", "ziglang", "clang", "-resource-dir", resources, "-x", "hip", "-std=c++20"),
        *(f"--offload-arch={TARGET}", "-nogpulib", "-nogpuinc", "--cuda-device-only", "-O3", "-ffp-contract=off"),
        *("-Wall", "-Wextra", "-Werror", f"-DLLM_COMM_POLLS_PER_CHECK={POLLS_PER_CHECK}"),
        *(f"-I{REPOSITORY / 'csrc'}", f"-I{REPOSITORY / 'csrc' / 'include'}", f"-I{generated}"),
        *("-S", generated / "algorithms" / f"kernels_{algorithm}.cpp", "-o", output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return output


@dataclass(frozen=True)
class Fault:
    """A fault to plant in assembly text."""

    name: str
    algorithm: str  # as in the registry
    plant: Callable[[str], str]
    failure: str  # regular expression of what schedules find


_ASSEMBLY_OF_BLOCK_SYNC = "\t;;#ASMSTART\n\ts_waitcnt vmcnt\\(0\\) lgkmcnt\\(0\\)\n\t;;#ASMEND\n"
_WRONG = "element|expired|not reset"
_PENDING = "pending register"


def _replace(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Callable[[str], str]:
    """Return a function that replaces all matches in a text, of which there must be some."""

    def replace(text: str) -> str:
        replaced, count = re.subn(pattern, by, text)
        if count == 0:
            raise ValueError(f"nothing matches {pattern}")
        return replaced

    return replace


def _wait_ahead_of_write_back(match: re.Match[str]) -> str:
    """Move all waits between a write-back and the store of a signal to before the write-back."""
    rest = re.sub(r"\ts_waitcnt .*\n", "", match[1])
    return f"\ts_waitcnt vmcnt(0) lgkmcnt(0)\n\tbuffer_wbl2 sc0 sc1\n{rest}"


def _invalidate_ahead_of_load(text: str) -> str:
    """Invalidate the caches before each load of a signal, and not after it."""
    without = _replace(r"\tbuffer_inv sc0 sc1\n", "")(text)
    return _replace(r"(\tglobal_load_dwordx2 .*off sc0 sc1\n)", r"\tbuffer_inv sc0 sc1\n\1")(without)


def _swap_ranks(text: str) -> str:
    """Swap the second and the third of the values that a thread adds to those of rank 0 and 1."""
    waited = re.sub(r"s_waitcnt lgkmcnt\(\d+\)", "s_waitcnt lgkmcnt(0)", text)
    shifted = r"(\tv_lshlrev_b32_e32 v\d+, 16, )(v\d+)\n"
    between = r"((?:\ts_waitcnt lgkmcnt\(0\)\n|\tv_add_f32_e32 .*\n)+)"
    return _replace(shifted + between + shifted, r"\1\5\n\3\4\2\n")(waited)


def _without_waits_for_loads(text: str) -> str:
    """Remove the waits that the compiler has inserted before uses of loaded values."""
    return _replace(r"(?<!;;#ASMSTART\n)\ts_waitcnt vmcnt\(\d+\)\n(?!\tbuffer_inv)", "")(text)


_STORE = r"global_store_dwordx4 (v\[\d+:\d+\]), v\[(\d+):(\d+)\], off sc0 sc1"
FAULTS: Sequence[Fault] = (
    Fault("add_is_subtract", "one_shot", _replace("v_add_f32_e32", "v_sub_f32_e32"), _WRONG),
    Fault("ranks_are_added_in_another_order", "one_shot", _swap_ranks, "element"),
    Fault(
        "lower_half_of_a_line_is_stored",
        "one_shot",
        _replace(_STORE, lambda m: f"global_store_dwordx2 {m[1]}, v[{m[2]}:{int(m[2]) + 1}], off sc0 sc1"),
        "expired",
    ),
    Fault(
        "halves_of_a_line_are_alike",
        "two_shot",
        _replace(
            rf"\t{_STORE}\n",
            lambda m: "".join(
                f"\tglobal_store_dwordx2 {m[1]}, v[{m[2]}:{int(m[2]) + 1}], off{offset} sc0 sc1\n"
                for offset in ("", " offset:8")
            ),
        ),
        _WRONG,
    ),
    Fault(
        "no_reset_of_a_line",
        "one_shot",
        _replace(
            r"(\tv_mov_b32_e32 v\d+, -1\n(?:\tv_mov_b32_e32 v\d+, v\d+\n){3}\t;;#ASMSTART\n)"
            r"\tglobal_store_dwordx4 .*\n",
            r"\1",
        ),
        "not reset|element|expired",
    ),
    Fault("no_waits_for_loads", "one_shot", _without_waits_for_loads, _PENDING),
    Fault("no_waits_for_loads", "two_shot", _without_waits_for_loads, _PENDING),
    Fault("no_waits_for_local_memory", "two_shot", _replace(r"\ts_waitcnt lgkmcnt\(\d+\)\n", ""), _PENDING),
    Fault("no_write_back", "two_shot_hb", _replace(r"\tbuffer_wbl2 sc0 sc1\n", ""), _WRONG),
    Fault(
        "wait_ahead_of_write_back",
        "two_shot_hb",
        _replace(r"\tbuffer_wbl2 sc0 sc1\n((?:.*\n){1,14}?\tglobal_store_dwordx2 )", _wait_ahead_of_write_back),
        _WRONG,
    ),
    Fault("no_wait_before_barrier", "two_shot_hb", _replace(_ASSEMBLY_OF_BLOCK_SYNC, ""), _WRONG),
    Fault("no_invalidate", "two_shot_hb", _replace(r"\tbuffer_inv sc0 sc1\n", ""), _WRONG),
    Fault("invalidate_ahead_of_the_load", "two_shot_hb", _invalidate_ahead_of_load, _WRONG),
    Fault(
        "signal_is_loaded_through_the_caches",
        "two_shot_hb",
        _replace(r"(\tglobal_load_dwordx2 .*off) sc0 sc1\n", r"\1\n"),
        _WRONG,
    ),
)
