"""Links between the GPUs of a machine, as NVML or nvidia-smi tells them, and what comes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from llm_comm.runtime import links

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-63\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t0-63\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_topology_of_nvidia_smi() -> None:
    # run_tool() takes the blanks before the head away.
    for text in (TOPOLOGY, TOPOLOGY.strip()):
        assert links.parse_topology(text) == [
            ["X", "NV18", "SYS"],
            ["NV18", "X", "NODE"],
            ["SYS", "NODE", "X"],
        ]


def test_links_follow_cudas_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"topo": TOPOLOGY, "--query-gpu=uuid": "GPU-a\nGPU-b\nGPU-c"}
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(links, "run_tool", lambda _, option, *__: outputs[option])
    assert links.link_matrix(["GPU-c", "GPU-b"]) == [["X", "NODE"], ["NODE", "X"]]


def test_links_say_when_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(links, "run_tool", lambda *_: None)
    with pytest.raises(RuntimeError, match="nvidia-smi does not answer"):
        links.link_matrix(["GPU-a", "GPU-b"])


class FakeNvml:
    """Three GPUs: a and b share two NVLinks, a has one to a switch, c hangs on PCIe."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        """As raised for a link that a GPU does not have."""

    ends: ClassVar = {"a": ["b", "b", "switch", "c"], "b": ["a", "a"], "c": []}

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetPciInfo(self, gpu: str) -> Any:
        return SimpleNamespace(busId=gpu)

    def nvmlDeviceGetP2PStatus(self, a: str, b: str, _index: int) -> int:
        return 0 if "c" not in (a, b) else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, _a: str, _b: str) -> int:
        return 50

    def nvmlDeviceGetNvLinkState(self, gpu: str, link: int) -> int:
        if link >= len(self.ends[gpu]):
            raise self.NVMLError
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: str, link: int) -> Any:
        return SimpleNamespace(busId=self.ends[gpu][link])


def test_links_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(links.importlib, "import_module", lambda _: FakeNvml())
    assert links.link_matrix(["a", "b", "c"]) == [
        ["X", "NV3", "SYS"],
        ["NV2", "X", "SYS"],
        ["SYS", "SYS", "X"],
    ]


def test_more_than_two_gpus_need_nvlink_between_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(links.importlib, "import_module", lambda _: FakeNvml())
    assert links.why_too_slow({0: "a", 1: "b", 2: "c"}).startswith(
        "GPUs of ranks 0 and 2 have no NVLink between them (SYS)"
    )
    assert links.why_too_slow({0: "a", 1: "c"}) == ""
    # Ranks that share GPUs.
    assert links.why_too_slow(dict(enumerate(["a", "a", "b", "b"]))) == ""
    assert links.why_too_slow({4: "b", 5: "b", 6: "a", 7: "c"}).startswith("GPUs of ranks 4 and 7 have no NVLink")


def test_unknown_links_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(links, "run_tool", lambda *_: None)
    assert links.why_too_slow({0: "a", 1: "b", 2: "c"}) == ""


def test_links_as_nvidia_smi_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = {"topo": TOPOLOGY.strip(), "--query-gpu=uuid": "GPU-a\nGPU-b\nGPU-c"}
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(links, "run_tool", lambda _, option, *__: outputs[option])
    gpus = {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}
    assert links.why_too_slow(gpus).startswith("GPUs of ranks 0 and 2 have no NVLink between them (SYS)")
    outputs["topo"] = outputs["topo"].replace("SYS", "NV18").replace("NODE", "NV6")
    assert links.why_too_slow(gpus) == ""


def test_a_level_that_nvml_does_not_tell_is_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise FakeNvml.NVMLError

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetTopologyCommonAncestor", fail)
    monkeypatch.setattr(links.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(links.importlib, "import_module", lambda _: FakeNvml())
    assert links.why_too_slow({0: "a", 1: "b", 2: "c"}).startswith(
        "GPUs of ranks 0 and 2 have no NVLink between them (PCIe)"
    )
