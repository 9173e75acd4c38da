"""Plugin for vLLM: entry point of the group ``vllm.general_plugins``, loaded in each of its processes."""

from __future__ import annotations

from typing import Any

from llm_comm_bench import FREE


def register() -> None:
    """Install what the environment asks for. May be called more than once."""
    if FREE:
        from vllm.platforms import current_platform

        platform: Any = type(current_platform)
        platform.get_device_communicator_cls = classmethod(
            lambda cls: "llm_comm_bench.vllm_free_communicator.FreeCommunicator"
        )
