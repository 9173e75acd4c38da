"""Words by which threads of the host and of GPUs tell each other of data (docs/experiments/arm_hosts.md)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CSRC = TESTS.parent / "csrc"
PROGRAM = TESTS / "host_order" / "main.cpp"
PROXY, EXECUTOR = CSRC / "host" / "proxy.cpp", CSRC / "emulator" / "executor.cpp"
OTHERS = [CSRC / name for name in ("host/port_batch.cpp", "emulator/fiber.cpp", "emulator/gpu_thread.cpp")]
FLAGS = ["-std=c++20", "-O1", "-Wno-psabi", "-DLLM_COMM_EMULATOR", "-pthread", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
CROSS = "aarch64-linux-gnu-"
#: Machine instructions for Arm that order a word, by source file and function.
ORDERS = [
    (PROXY, "ProxyPorts::take_one()", "ldar"),  # a request, before what it asks to copy
    (PROXY, "ProxyPorts::take()", "stlr"),  # `tail`, after the entries have been read
    (PROXY, "ProxyPorts::settle(", "ldar"),
    (PROGRAM, "void llm_comm::emulated::store_packets_release<6u>", "CALL26.*store_release"),
    (PROGRAM, "MemoryTransport::signal(", "stlr"),  # signals and local completions, after the data
    (PROGRAM, "void llm_comm::emulated::store_release<unsigned long>", "stlr"),
    (PROGRAM, "void llm_comm::emulated::store_release<unsigned int>", "stlr"),  # `complete`, after the error
    (PROGRAM, "unsigned long llm_comm::emulated::load_acquire<unsigned long>", "ldar"),
    (PROGRAM, "llm_comm::host::has_error(", "ldar"),
    (EXECUTOR, "Executor::run(", "CALL26.*fence_system"),  # between grids
    (EXECUTOR, "fence_system()", "dmb\tish$"),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_no_word_is_seen_before_its_data(tmp_path: Path) -> None:
    program = tmp_path / "litmus"
    inputs = map(str, [PROGRAM, PROXY, EXECUTOR, *OTHERS])
    subprocess.run(["g++", *FLAGS, "-Wall", "-Wextra", "-Werror", *inputs, "-o", str(program)], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which(f"{CROSS}g++") is None, reason=f"no {CROSS}g++")
def test_machine_code_for_arm_orders_each_word(tmp_path: Path) -> None:
    """Instructions that x86-64 does without, such as a store with release."""
    code: dict[Path, list[tuple[str, str]]] = {}
    for source in {source for source, _, _ in ORDERS}:
        compiled = tmp_path / f"{source.stem}.o"
        command = [f"{CROSS}g++", *FLAGS, "-O0", "-c", str(source), "-o", str(compiled)]
        subprocess.run(command, check=True, timeout=300)
        command = [f"{CROSS}objdump", "-drC", "--no-show-raw-insn", str(compiled)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code[source] = re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)*)", listed, re.MULTILINE)
    missing = [
        (function, instruction)
        for source, function, instruction in ORDERS
        if not any(function in name and re.search(instruction, text, re.MULTILINE) for name, text in code[source])
    ]
    assert missing == []
