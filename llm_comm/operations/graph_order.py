"""Keeps calls in a compiled graph in the order of the program, on every rank.

Ranks compile for themselves. Nothing but the flow of data keeps two nodes of a graph in order: passes and schedulers
may turn round calls that do not depend on each other, and what they choose can rest on what a rank has measured. So
each call that does not depend on the call before is given a result of that one as a last operand, ``after``, which
nobody reads. It happens when torch.compile traces, before any pass of it. Calls that depend on each other anyway, as in
most models, stay as they are.

torch has effect tokens for this (``torch.library._register_effectful_op``). With them torch 2.13 compiles neither
``torch.cond`` nor ``torch.while_loop`` around a call, and keeps no compiled graph on disk.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

_Node = torch.fx.Node

#: The operand, last in the schema of an operator whose calls are kept in order.
OPERAND = "Tensor? after=None"

_in_order: set[torch._ops.OpOverload] = set()


def keep_in_order(called: torch._ops.OpOverload) -> None:
    """Calls of an operator, which has ``OPERAND``, keep their place among all such calls of a graph."""

    def trace(mode: ProxyTorchDispatchMode, *arguments: Any, **options: Any) -> Any:
        with mode:  # which is off in a rule
            result = called._op_dk(torch._C.DispatchKey.Python, *arguments, **options)
        _order_last_call(mode.tracer.graph)
        return result

    _in_order.add(called)
    called.py_impl(ProxyTorchDispatchMode)(trace)


def _order_last_call(graph: torch.fx.Graph) -> None:
    """Makes the last call of the graph depend on the one before it, if there is one and it does not."""
    call: _Node | None = None
    later: list[_Node] = []  # than the call before, last to first
    for node in reversed(graph.nodes):
        if node.target in _in_order:
            if call is not None:
                _order(node, call, later)
                return
            call = node
        if call is not None:
            later.append(node)


def _order(before: _Node, call: _Node, later: list[_Node]) -> None:
    dependent = {before}
    for node in reversed(later):
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    if call in dependent:
        return
    others = len(cast(torch._ops.OpOverload, call.target)._schema.arguments) - 1
    result = _result_of(before)
    call.args = (*call.args[:others], result)
    if "eager_input_vals" in call.meta:  # by which inductor keeps the strides of operands
        arguments, options = call.meta["eager_input_vals"]
        call.meta["eager_input_vals"] = ((*arguments[:others], result.meta["val"]), options)


def _result_of(call: _Node) -> _Node:
    """A result of a call, the last one where there are several: the smallest, or one that lives long anyway."""
    if isinstance(call.meta["val"], torch.Tensor):
        return call
    results = [user for user in call.users if user.target is operator.getitem]
    return max(results, key=lambda node: cast(int, node.args[1]))
