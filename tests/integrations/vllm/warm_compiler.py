"""What torch's compiler and vLLM do when they are first used, done once in the process that forks the ranks.

Each rank would do it anew. Nothing of vLLM's configuration, its groups or llm_comm is touched. No thread is left: a
fork would lose it, together with the locks that it holds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable
from typing import Any

import torch
import tqdm
from torch._dynamo.funcname_cache import get_funcname
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import select_decomp_table

# What vLLM imports when it makes groups and layers, in the versions that have it.
_MODULES = (
    "vllm.distributed.device_communicators.custom_all_reduce",
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
    "vllm.distributed.device_communicators.quick_all_reduce",
    "vllm.distributed.device_communicators.symm_mem",
    "vllm.distributed.ec_transfer.ec_transfer_state",
    "vllm.model_executor.kernels.linear",
    "vllm.model_executor.model_loader",
    "vllm.v1.executor",
)
# Whose functions are in the models of scenarios: dynamo reads these files, to say in a graph where a node is from.
_TRACED = (
    "torch.nn.modules.linear",
    "vllm.distributed.parallel_state",
    "vllm.ir.op",
    "vllm.model_executor.layers.activation",
    "vllm.model_executor.layers.layernorm",
    "vllm.model_executor.layers.quantization.input_quant_fp8",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
    "vllm.model_executor.parameter",
)


def warm_up(scenarios: Iterable[str]) -> None:
    """To be called before ranks are forked.

    Args:
        scenarios: The files with their models.

    Raises:
        RuntimeError: It has left a thread.
    """
    before = _threads()
    torch.set_num_threads(1)  # no pool of OpenMP
    tqdm.tqdm.monitor_interval = 0  # no thread that looks after bars
    _import(_MODULES)
    for module in _import(_TRACED):
        get_funcname(module.__file__, 1)
    for file in scenarios:
        get_funcname(file, 1)
    pick_vec_isa()  # compiles a program for each set of vector instructions: most of the time of a small model
    _trace()
    if _threads() > before:
        raise RuntimeError(f"a process that is to fork had {before} threads and has {_threads()} after warming up")


def _import(names: Iterable[str]) -> list[Any]:
    """Those that this version has."""
    found = []
    for name in names:
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found


def _trace() -> None:
    """A layer and a norm of torch's, with the decompositions of inductor and without its code."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def as_it_is(graph: torch.fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(graph)

        return aot_module_simplified(graph, inputs, fw_compiler=as_it_is, decompositions=select_decomp_table())

    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def model(x: torch.Tensor) -> Any:
        y = layer(x * 2) + x
        wide = y.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        gate, up = torch.cat([y, x], -1).chunk(2, -1)
        return normed.view(-1, 2, 32), torch.nn.functional.silu(gate) * up

    x = torch.ones(4, 64, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    torch._dynamo.reset()


def _threads() -> int:
    """Also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))
