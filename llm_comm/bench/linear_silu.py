"""The ways to compute gate-and-up projections with silu-and-mul that ``llm-comm bench linear --silu`` times, and what
judges their results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llm_comm.bench.fused import as_engines_run
from llm_comm.bench.linear_arms import Arm, Names, Operands
from llm_comm.bench.reference import worst
from llm_comm.bench.report import OURS
from llm_comm.communicator import Communicator

SILU_REMARK = "silu-and-mul behind cublas: what torch.compile makes one kernel of"
# How far silu moves at most where its gate moves by 1.
_STEEPEST = 1.1


def silu_and_mul(products: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of a row."""
    gate, up = products.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_of_engines(comm: Communicator) -> Callable[[Tensor], Tensor]:
    """``silu_and_mul`` as an engine runs it."""
    return as_engines_run(silu_and_mul, comm)


class SiluJudge:
    """The results of all layers in float64, which judge those of an arm."""

    def __init__(self, operands: Operands) -> None:
        x = operands.x.double()
        self._inputs = x.shape[1]
        self._products = [x @ weight.double().t() for weight in operands.weights]
        self._magnitudes = [x.abs() @ weight.double().abs().t() for weight in operands.weights]

    def layer(self, out: Tensor, index: int, rounds_once: bool) -> float:
        """As of ``Judge``: how far off a result is, as a fraction of what rounding explains.

        Args:
            rounds_once: Allow gate and up a float32 accumulation and one rounding each, and one of the result;
                otherwise every partial sum may be rounded, and silu.
        """
        epsilon, single = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
        products, magnitudes = self._products[index], self._magnitudes[index]
        if rounds_once:
            allowed = products.abs() * (epsilon / 2) + magnitudes * (self._inputs * single / 2)
        else:
            allowed = magnitudes * epsilon
        (gate, up), (of_gate, of_up) = products.chunk(2, dim=-1), allowed.chunk(2, dim=-1)
        silu = torch.nn.functional.silu(gate)
        drift = _STEEPEST * of_gate * (up.abs() + of_up) + silu.abs() * of_up
        rounding = (epsilon / 2 if rounds_once else epsilon) + 3 * single
        return worst(out.double() - silu * up, drift + ((silu * up).abs() + drift) * rounding)


def our_silu_arm(comm: Communicator, operands: Operands, judge: SiluJudge) -> Arm:
    """Projection and silu-and-mul in one kernel."""

    def call(weight: Tensor) -> tuple[Tensor, ...]:
        return (comm.linear_silu_and_mul(operands.x, weight, out=operands.out),)

    return Arm(OURS, call, lambda found, index: judge.layer(found[0], index, True))


def other_silu_arm(comm: Communicator, operands: Operands, judge: SiluJudge, silu: Callable[[Tensor], Tensor]) -> Arm:
    """The projection, and ``silu``, which is ``silu_and_mul``, behind it."""
    products = operands.out.new_empty(operands.out.shape[0], 2 * operands.out.shape[1])

    def call(weight: Tensor) -> tuple[Tensor, ...]:
        torch.mm(operands.x, weight.t(), out=products)
        return (silu(products),)

    name = Names.of(not comm.is_emulated, silu=True).layer
    return Arm(name, call, lambda found, index: judge.layer(found[0], index, False))
