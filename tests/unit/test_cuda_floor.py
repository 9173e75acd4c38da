"""The oldest CUDA that the build admits assembles every instruction of the platform headers.

The assembler is that of the wheel nvidia-cuda-nvcc-cu12. The nvcc of this machine writes PTX of the headers' functions,
not inlined. The version line of that PTX is replaced by the one that the old assembler knows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEADERS = REPOSITORY / "csrc" / "include" / "llm_comm"
#: PTX ISA by CUDA version, from "Release Notes" of the PTX ISA manual.
PTX_ISA = {"12.4": "8.4"}
WHEELS = {"12.4": "nvidia-cuda-nvcc-cu12==12.4.131"}
PROBE = """
#include "llm_comm/platform.cuh"
#include "llm_comm/platform_cuda_multicast.cuh"
#include "llm_comm/platform_cuda_tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {
template __device__ void fetch_boxes<1>(SharedAddress, const MatrixView&, uint32_t, uint32_t, uint32_t, uint32_t,
                                        SharedAddress, BoxUse, uint32_t);
template __device__ void fetch_boxes<2>(SharedAddress, const MatrixView&, uint32_t, uint32_t, uint32_t, uint32_t,
                                        SharedAddress, BoxUse, uint32_t);
template __device__ void fetch_end<true>(SharedAddress);
template __device__ void multiply_boxes<OperandType::kFloat8>(float (&)[4], Box, uint32_t, Box);
template __device__ void multiply_boxes<OperandType::kBFloat16>(float (&)[4], Box, uint32_t, Box);
template __device__ void multiply_boxes<OperandType::kFloat16>(float (&)[4], Box, uint32_t, Box);
template __device__ void multiply_wait<0>(float (&)[4]);
template __device__ void multiply_rows<OperandType::kBFloat16>(
    float (&)[1][2][4], SharedAddress, const TokenPieces<OperandType::kBFloat16> (&)[1][kTokenColumns]);
template __device__ void multiply_rows<OperandType::kFloat16>(
    float (&)[1][2][4], SharedAddress, const TokenPieces<OperandType::kFloat8> (&)[1][kTokenColumns]);
template __device__ void store_packets_release(void*, const Line (&)[1]);
}  // namespace llm_comm::inline LLM_COMM_TARGET
"""


def floor() -> str:
    (version,) = set(
        re.findall(
            r"LLM_COMM_NVCC_VERSION VERSION_GREATER_EQUAL ([0-9.]+)\)\n *set\(LLM_COMM_HAS_CUDA 1",
            (REPOSITORY / "cmake" / "cuda.cmake").read_text(encoding="utf-8"),
        )
    )
    return str(version)


def ptxas(version: str) -> Path:
    directory = REPOSITORY / ".cache" / f"ptxas-{version}"
    found = directory / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    if not found.is_file():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        downloads = directory.with_name(directory.name + ".wheel")
        command = [*pip, "download", "--no-deps", "--dest", str(downloads), WHEELS[version]]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip(f"{WHEELS[version]} cannot be downloaded")
        (wheel,) = downloads.glob("*.whl")
        zipfile.ZipFile(wheel).extract("nvidia/cuda_nvcc/bin/ptxas", directory)
        shutil.rmtree(downloads)
        found.chmod(0o755)
    return found


def mnemonics() -> set[str]:
    """Instructions in the assembly of the headers, as far as their names are written out."""
    found: set[str] = set()
    for header in HEADERS.glob("platform_cuda*.cuh"):
        for text in re.findall(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)', header.read_text(encoding="utf-8")):
            code = "".join(re.findall(r'"([^"]*)"', text)).replace("\\n", "\n")
            found.update(re.findall(r"(?:^|[;{}\n])\s*(?:@p )?([a-z][a-z0-9_:]*(?:\.[a-z0-9_:]+)+)", code))
    return found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_oldest_assembler_knows_every_instruction(tmp_path: Path) -> None:
    shutil.copytree(HEADERS, tmp_path / "llm_comm")
    header = tmp_path / "llm_comm" / "platform_cuda.cuh"
    text = header.read_text(encoding="utf-8")
    assert "__device__ __forceinline__" in text
    header.write_text(text.replace("__device__ __forceinline__", "__device__"), encoding="utf-8")
    (tmp_path / "probe.cu").write_text(PROBE, encoding="utf-8")
    version = floor()
    assembler = ptxas(version)
    codes = []
    for arch in ("80", "90", "90a"):
        ptx = tmp_path / f"probe_{arch}.ptx"
        nvcc = ["nvcc", "-std=c++20", "-rdc=true", "-ptx", f"-arch=compute_{arch}", f"-I{tmp_path}"]
        subprocess.run([*nvcc, str(tmp_path / "probe.cu"), "-o", str(ptx)], check=True)
        codes.append(ptx.read_text(encoding="utf-8"))
        line = f".version {PTX_ISA[version]}"
        ptx.write_text(re.sub(r"^\.version .*$", line, codes[-1], flags=re.MULTILINE), encoding="utf-8")
        command = [str(assembler), "-c", "-O0", f"-arch=sm_{arch}", str(ptx), "-o", str(tmp_path / "probe.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"sm_{arch}: {done.stderr}"
    missing = {name for name in mnemonics() if not any(name in code for code in codes)}
    assert not missing, "the probe has no function with these instructions"
