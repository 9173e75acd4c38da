"""Arms of the comparison: what each switches in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arm:
    """One all-reduce implementation, in an otherwise equal engine.

    Attributes:
        name: Name on the command line and in results.
        label: Label in tables and plots.
        environment: Environment variables of the engine's processes.
        disable_custom_all_reduce: Value of this option, which vLLM and SGLang share.
        own_fusion: The engine may fuse all-reduces with the following norms through FlashInfer. vLLM does so by
            default, SGLang if ``--engine-option`` asks for it.
        llm_comm: The log must say that llm_comm is active; otherwise it must not.
        fuses: The log must say that llm_comm has fused an all-reduce with its norm; otherwise it must not.
        norms_apart: The log must say that llm_comm was configured not to fuse; otherwise it must not.
        programs: The log must say that DSL programs serve all-reduces; otherwise it must not.
        linear_apart: The log must say that llm_comm was configured not to compute linear layers; otherwise it must not.
        lossy: The log must say that llm_comm quantizes large all-reduces. The environment may switch this on for other
            arms.
        free: All-reduces return uninitialised memory. The arm is a bound, not a usable engine.
        free_norms: The residual add and norm after each all-reduce do nothing, too.
        nccl_library: The engine loads llm_comm's NCCL-compatible library instead of NCCL, and no plugin of llm_comm.
            The log must say that the library serves a communicator; otherwise it must not.
        by_default: Compared if no arms are named.
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
    lossy: bool = False
    free: bool = False
    free_norms: bool = False
    nccl_library: bool = False
    by_default: bool = True


_OFF = {"LLM_COMM_ENABLE": "0"}
_ON = {"LLM_COMM_ENABLE": "1"}

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        # disable_custom_all_reduce does not cover vLLM's FlashInfer all-reduces.
        Arm(
            "nccl",
            "NCCL",
            {**_OFF, "VLLM_ALLREDUCE_USE_FLASHINFER": "0"},
            disable_custom_all_reduce=True,
            own_fusion=False,
        ),
        # like nccl, except for the library
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
        # like llm_comm_unfused, except for the kernels of the all-reduces
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
        # like llm_comm, if no tuning table prefers a layer and fuse_linear is not true
        Arm(
            "llm_comm_no_linear",
            "llm_comm, linear layers apart",
            {**_ON, "LLM_COMM_FUSE_LINEAR": "0"},
            llm_comm=True,
            fuses=True,
            linear_apart=True,
            by_default=False,
        ),
        Arm(
            "llm_comm_wire",
            "llm_comm, large sums quantized",
            {**_ON, "LLM_COMM_WIRE": "fp8"},
            llm_comm=True,
            fuses=True,
            lossy=True,
            by_default=False,
        ),
        Arm("free", "free (bound: no communication, wrong results)", _OFF, own_fusion=False, free=True),
        Arm(
            "free_norm",
            "free (bound: no communication, add and norm, wrong results)",
            # vLLM's compile cache does not distinguish graphs without norms from those of the arm `free`.
            {**_OFF, "VLLM_DISABLE_COMPILE_CACHE": "1"},
            own_fusion=False,
            free=True,
            free_norms=True,
            by_default=False,
        ),
    )
}

#: Baselines, our arm, and the bound.
NCCL, DEFAULT, OURS, FREE = "nccl", "default", "llm_comm", "free"
