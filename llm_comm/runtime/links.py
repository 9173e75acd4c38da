"""Links between the GPUs of a machine, and whether a group without NVLink is served."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from llm_comm.config import Config
from llm_comm.installation import run_tool
from llm_comm.planning.tables import TuningTable
from llm_comm.runtime.devices import gpu_name

logger = logging.getLogger("llm_comm")

_PCIE_LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def is_unmeasured(table: TuningTable, config: Config) -> bool:
    """Return whether nobody says that llm_comm is faster than NCCL here: ``table`` was not measured on such a machine,
    and the operator names neither a table nor an algorithm."""
    return not table.origin.is_tuned and config.table is None and config.algorithm == "auto"


def why_too_slow(gpus: Mapping[int, str]) -> str:
    """Return why NCCL is expected to be faster for a group of GPUs where nothing was measured, or "".

    More than two GPUs need NVLink between all of them, as for the engines' own custom all-reduces. "" also if neither
    NVML nor nvidia-smi tells the links.

    Args:
        gpus: UUID of the GPU of each rank of a node.
    """
    if len(set(gpus.values())) <= 2:
        return ""
    try:
        matrix = link_matrix(list(gpus.values()))
    except Exception as error:  # pynvml has exceptions of its own
        logger.debug("llm_comm: the links between the GPUs are unknown: %s", error)
        return ""
    for (rank, gpu), links in zip(gpus.items(), matrix, strict=True):
        for (peer, other), link in zip(gpus.items(), links, strict=True):
            if gpu != other and not link.startswith("NV"):
                return (
                    f"GPUs of ranks {rank} and {peer} have no NVLink between them ({link}); llm-comm tune --install "
                    "finds out whether llm_comm is faster than NCCL"
                )
    return ""


def link_matrix(uuids: Sequence[str]) -> list[list[str]]:
    """Return the kind of link between each two GPUs: NV<number of NVLinks>, or the PCIe level in nvidia-smi's terms.

    Args:
        uuids: UUIDs of the GPUs. CUDA's numbering can differ from the driver's.

    Raises:
        RuntimeError: Neither pynvml nor nvidia-smi is available.
    """
    if importlib.util.find_spec("pynvml") is not None:
        return _links_from_nvml(uuids)
    topology = run_tool("nvidia-smi", "topo", "-m")
    numbering = run_tool("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    if topology is None or numbering is None:
        raise RuntimeError("pynvml is not installed and nvidia-smi does not answer")
    matrix = parse_topology(topology)
    order = [numbering.split().index(uuid) for uuid in uuids]
    return [[matrix[a][b] for b in order] for a in order]


def fabric_domain(device: torch.device) -> str:
    """Return the NVLink domain of a GPU: the UUID of its cluster and its clique in it, in which GPUs reach each other's
    memory. "" outside of a domain, as on hosts with switches of their own, and where NVML does not tell."""
    if device.type != "cuda":
        return ""
    try:
        with _nvml() as pynvml:
            info = pynvml.c_nvmlGpuFabricInfo_v2_t()
            pynvml.nvmlDeviceGetGpuFabricInfoV(pynvml.nvmlDeviceGetHandleByUUID(gpu_name(device)), ctypes.byref(info))
    except Exception as error:  # pynvml has exceptions of its own; older ones lack the call
        logger.debug("llm_comm: the NVLink domain of the GPU is unknown: %s", error)
        return ""
    cluster = bytes(info.clusterUuid)
    has_registered = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
    return f"{cluster.hex()}/{info.cliqueId}" if has_registered and any(cluster) else ""


def parse_topology(text: str) -> list[list[str]]:
    """Parse the GPU part of ``nvidia-smi topo -m``, in the driver's numbering; "X" on the diagonal."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    # The head of the table names several GPUs.
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s+(?!GPU)", line)]
    # The columns after those of the GPUs are network cards and affinities.
    return [row[1 : 1 + len(rows)] for row in rows]


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Module pynvml, with NVML initialized."""
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _links_from_nvml(uuids: Sequence[str]) -> list[list[str]]:
    with _nvml() as pynvml:
        gpus = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return [[_link_from_nvml(pynvml, a, b, gpus) for b in gpus] for a in gpus]


def _link_from_nvml(nvml: Any, a: Any, b: Any, gpus: Sequence[Any]) -> str:
    if a is b:
        return "X"
    if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != nvml.NVML_P2P_STATUS_OK:
        try:
            level = nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)
        except nvml.NVMLError:  # as in some virtual machines
            return "PCIe"
        return _PCIE_LEVELS.get(level, f"PCIe level {level}")
    addresses = {nvml.nvmlDeviceGetPciInfo(gpu).busId for gpu in gpus}
    elsewhere = addresses - {nvml.nvmlDeviceGetPciInfo(b).busId}
    # A link that ends at no other GPU ends at this one, or at a switch that reaches all GPUs.
    return f"NV{sum(end not in elsewhere for end in _link_ends(nvml, a))}"


def _link_ends(nvml: Any, gpu: Any) -> list[Any]:
    """Return the PCI addresses at the far ends of a GPU's active NVLinks."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                ends.append(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)
        except nvml.NVMLError:  # this GPU has no more links
            break
    return ends
