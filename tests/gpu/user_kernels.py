"""A kernel of somebody's own (tests/user_kernel) on GPUs: compiled against the installed headers, then run.

    python tests/gpu/user_kernels.py

Two GPUs, or twice the only one, swap buffers in every way that a MemoryChannel offers.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from common import parser, report, run, wants_cuda

import llm_comm

SOURCES = Path(__file__).parents[1] / "user_kernel"
KERNELS = ("exchange_with_signals", "exchange_packets", "count_signals")


def nvcc_path() -> str | None:
    """The toolkit's directory is often not on the PATH."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def main() -> int:
    options = parser((__doc__ or "").partition("\n")[0])
    arguments = options.parse_args()
    if not wants_cuda(arguments.device):
        raise SystemExit("user_kernels.py needs a GPU; tests/unit/test_user_kernel.py runs on emulated ones")
    nvcc = nvcc_path()
    if nvcc is None:
        raise SystemExit("nvcc is not on the PATH; it comes with the CUDA toolkit")
    major, minor = torch.cuda.get_device_capability(0)
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "exchange")
        flags = ["-std=c++20", f"-arch=sm_{major}{minor}", "-Werror=all-warnings", "-I", llm_comm.get_include()]
        subprocess.run([nvcc, *flags, str(SOURCES / "gpu_main.cu"), "-o", str(program)], check=True, timeout=200)
        done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    print(done.stdout + done.stderr, flush=True)
    right = [f"{kernel}: failures 0 and 0" in done.stdout for kernel in KERNELS]
    failed = done.returncode != 0 or not all(right)
    table = [("kernel", "outcome")]
    table += [(kernel, "ok" if is_right else "FAIL") for kernel, is_right in zip(KERNELS, right, strict=True)]
    report("user_kernels", "cuda", 2, table, {"status": done.returncode, "printed": done.stdout}, arguments.json)
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
