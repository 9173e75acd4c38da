"""tools/compare_sass.py, with stand-ins for the programs of the CUDA toolkit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tools" / "compare_sass.py"
KERNEL = """\tFunction : {name}
        /*0000*/                   MOV R1, {register} ;   /* 0x0000000000017a02 */
                                                          /* 0x000fe40000000f00 */
"""


@pytest.fixture
def compare(tmp_path: Path) -> object:
    """compare(before, after): texts of cuobjdump. A stand-in prints the file that it is given."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in (("cuobjdump", '#!/bin/sh\nfor last; do :; done\ncat "$last"\n'), ("c++filt", _FILTER)):
        (tools / name).write_text(script, encoding="utf-8")
        (tools / name).chmod(0o755)

    def run(before: str, after: str) -> subprocess.CompletedProcess[str]:
        files = []
        for name, text in (("before", before), ("after", after)):
            files.append(tmp_path / name)
            files[-1].write_text(text, encoding="utf-8")
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        command = [sys.executable, PROGRAM, *files]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


_FILTER = """#!/bin/sh
for name; do echo "void llm_comm::cuda::$name<(llm_comm::cuda::DataType)0, (int)2>(llm_comm::cuda::Args)"; done
"""


def test_same_kernels(compare) -> None:  # type: ignore[no-untyped-def]
    text = KERNEL.format(name="one_shot", register="R2") + KERNEL.format(name="two_shot", register="R3")
    done = compare(text, text)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 common kernels are the same" in done.stdout


def test_another_instruction_is_seen(compare) -> None:  # type: ignore[no-untyped-def]
    done = compare(KERNEL.format(name="one_shot", register="R2"), KERNEL.format(name="one_shot", register="R3"))
    assert done.returncode == 1
    assert "differs: one_shot<(DataType)0, (int)2>" in done.stdout


def test_a_missing_kernel_is_seen(compare) -> None:  # type: ignore[no-untyped-def]
    one = KERNEL.format(name="one_shot", register="R2")
    done = compare(one + KERNEL.format(name="two_shot", register="R2"), one)
    assert done.returncode == 1
    assert "only before: two_shot" in done.stdout


def test_renamed_kernels_are_matched(compare) -> None:  # type: ignore[no-untyped-def]
    before = KERNEL.format(name="add_rms_norm_one_shot", register="R2")
    done = compare(before, KERNEL.format(name="all_reduce_add_rms_norm_one_shot", register="R2"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_build_without_kernels_is_an_error(compare) -> None:  # type: ignore[no-untyped-def]
    done = compare("", "")
    assert done.returncode != 0
    assert "no kernels for sm_90" in done.stderr
