"""llm_comm: low-latency tensor-parallel collectives for LLM inference engines."""

from __future__ import annotations

from llm_comm.bare_sources import give_way

give_way()  # before any import of the compiled module

# ruff: noqa: E402
from llm_comm.communicator import Communicator
from llm_comm.config import Config
from llm_comm.errors import (
    CommunicatorError,
    ConcurrentUseError,
    ConfigError,
    LaunchError,
    LlmCommError,
    MismatchError,
    PeerTimeout,
    RendezvousError,
    UnsupportedInputError,
)
from llm_comm.installation import VERSION as __version__
from llm_comm.installation import cuda_compiled, get_include, get_library_dir, get_nvrtc_options, nccl_library
from llm_comm.planning.plan import Plan
from llm_comm.runtime.channels import Channels
from llm_comm.runtime.statistics import Stats

#: Deprecated alias of ``Plan``.
FusedPlan = Plan

__all__ = [
    "Channels",
    "Communicator",
    "CommunicatorError",
    "ConcurrentUseError",
    "Config",
    "ConfigError",
    "FusedPlan",
    "LaunchError",
    "LlmCommError",
    "MismatchError",
    "PeerTimeout",
    "Plan",
    "RendezvousError",
    "Stats",
    "UnsupportedInputError",
    "__version__",
    "cuda_compiled",
    "get_include",
    "get_library_dir",
    "get_nvrtc_options",
    "nccl_library",
]
