"""Devices that serve each other with their tuning tables, because nothing that a table is measured for differs.

A table of collectives depends on three things: the compute capability (which kernels run), the number of
multiprocessors (how many blocks run at once), and the links between the devices (when two hops are faster than one).
Neither number tells of links: H800 and H100 NVL have both in common with H100 SXM, and fewer or other NVLinks. The
driver's name does. So a device is near to another if both names are in one group below and this device has the group's
compute capability and multiprocessors. Any other device has the general table: H20 (78 multiprocessors), H800 (8
NVLinks), H100 NVL and H200 NVL (bridges between some of the cards), H100 PCIe, parts of a GPU (MIG), A100, B200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class _Group(NamedTuple):
    compute_capability: int
    sm_count: int
    #: By the driver's name: what people call them.
    devices: Mapping[str, str]


_GROUPS = (
    # 18 NVLinks of the fourth generation each, all to switches. Their memory differs in speed, which bounds linear
    # layers and no collective.
    _Group(90, 132, {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}),
)


def near_devices(device_name: str, sm_count: int, compute_capability: int) -> Mapping[str, str]:
    """Other devices whose tables serve this one, by the driver's name: what people call them.

    Args:
        device_name: As the driver gives it.
        sm_count: Multiprocessors.
        compute_capability: 90 for 9.0; 0 where it is not known.
    """
    for group in _GROUPS:
        if device_name in group.devices and (compute_capability, sm_count) == group[:2]:
            return {name: short for name, short in group.devices.items() if name != device_name}
    return {}
