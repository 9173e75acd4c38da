"""The arms of the comparison: what is switched in the engine, and nothing besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arm:
    """One way to reduce, in an engine that is otherwise the same.

    Attributes:
        name: On the command line and in results.
        label: In tables and plots.
        environment: Variables of the engine's processes.
        disable_custom_all_reduce: The option of this name, which vLLM and SGLang share.
        own_fusion: Whether the engine may fuse all-reduces with the norms after them by FlashInfer. vLLM does so by
            default, SGLang where ``--engine-option`` asks for it.
        llm_comm: Whether the log must say that llm_comm is active; else it must not.
        fuses: Whether the log must say that llm_comm has fused a sum with its norm; else it must not.
        norms_apart: Whether the log must say that llm_comm was told not to fuse; else it must not.
        programs: Whether the log must say that programs of llm_comm.dsl serve all-reduces; else it must not.
        linear_apart: Whether the log must say that llm_comm was told to leave linear layers alone; else it must not.
        free: All-reduces return uninitialised memory: a bound, not an engine.
        free_norms: So does the residual add and norm behind each of them.
        nccl_library: The engine takes llm_comm's library for NCCL's, and loads no plugin of llm_comm. The log must say
            that the library serves a communicator; else it must not.
        by_default: Whether it is compared where no arms are named.
    """

    name: str
    label: str
    environment: Mapping[str, str] = field(default_factory=dict)
    disable_custom_all_reduce: bool = False
    own_fusion: bool = True
    llm_comm: bool = False
    fuses: bool = False
    norms_apart: bool = False
    programs: bool = False
    linear_apart: bool = False
    free: bool = False
    free_norms: bool = False
    nccl_library: bool = False
    by_default: bool = True


_OFF = {"LLM_COMM_ENABLE": "0"}
_ON = {"LLM_COMM_ENABLE": "1"}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        # vLLM's FlashInfer all-reduces are no custom all-reduce of that option.
        Arm(
            "nccl",
            "NCCL",
            {**_OFF, "VLLM_ALLREDUCE_USE_FLASHINFER": "0"},
            disable_custom_all_reduce=True,
            own_fusion=False,
        ),
        # The same but for the library.
        Arm(
            "nccl_library",
            "NCCL's API by llm_comm",
            {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"},
            disable_custom_all_reduce=True,
            own_fusion=False,
            nccl_library=True,
            by_default=False,
        ),
        Arm("default", "engine's own", _OFF),
        Arm("llm_comm", "llm_comm", _ON, llm_comm=True, fuses=True),
        Arm(
            "llm_comm_unfused", "llm_comm, norms apart", {**_ON, "LLM_COMM_FUSE": "0"}, llm_comm=True, norms_apart=True
        ),
        # The same, but for the kernels of the sums.
        Arm(
            "llm_comm_dsl",
            "llm_comm, sums by programs of its DSL",
            {
                **_ON,
                "LLM_COMM_FUSE": "0",
                "LLM_COMM_DSL": "llm_comm.dsl.library:one_shot_ll",
                "LLM_COMM_ALGORITHM": "dsl:one_shot_ll",
            },
            llm_comm=True,
            norms_apart=True,
            programs=True,
            by_default=False,
        ),
        # The same as llm_comm, where no tuning table prefers a layer and nobody asks for all of them.
        Arm(
            "llm_comm_no_linear",
            "llm_comm, linear layers apart",
            {**_ON, "LLM_COMM_FUSE_LINEAR": "0"},
            llm_comm=True,
            fuses=True,
            linear_apart=True,
            by_default=False,
        ),
        Arm("free", "free (bound: no communication, wrong results)", _OFF, own_fusion=False, free=True),
        Arm(
            "free_norm",
            "free (bound: no communication, add and norm, wrong results)",
            # vLLM would not tell compiled graphs without norms from those of the arm `free`.
            {**_OFF, "VLLM_DISABLE_COMPILE_CACHE": "1"},
            own_fusion=False,
            free=True,
            free_norms=True,
            by_default=False,
        ),
    )
}

#: What the others are compared with, and the bound.
NCCL, DEFAULT, OURS, FREE = "nccl", "default", "llm_comm", "free"
