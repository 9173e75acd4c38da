"""Every callable that takes tensors, each operand of it: what torch must know, what must not be written, what overlaps.

The walk knows callables by ``CASES``; ``test_every_callable_is_walked`` finds a new one that is not there.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import RankPool, make_communicator
from test_generic import OPERATION, with_stand_in
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import llm_comm
from llm_comm import Communicator, UnsupportedInputError, dsl
from llm_comm.dsl import library

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS, FEATURES = 2, 128
EPS = 1e-5
#: Bytes at a multiple of which the weight of a layer begins.
ALIGNMENT = 16
LAYER_WEIGHTS = {"weight", "gate_up_weight", "down_weight", "linear_weight", "router_weight"}

Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """One callable.

    Attributes:
        operands: Of a call that is right, by name.
        writes: Operands that are written.
        same: Pairs of a written and a read operand that may be the same memory.
        options: What else is passed by name.
        has_operator: Whether it is a torch operator for whom torch's dispatcher has to see it.
    """

    name: str
    operands: Tensors
    writes: tuple[str, ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    has_operator: bool = True

    def call(self, comm: Communicator, compiled: dsl.Compiled, tensors: Tensors) -> Any:
        """Make the call; return its results."""
        if self.name == "dsl":
            return compiled(**tensors)
        if self.name == "run":
            return comm.run(OPERATION, tensors)
        return getattr(comm, self.name)(**tensors, **self.options)


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def rows(outputs: int = FEATURES, dtype: torch.dtype = BF16) -> torch.Tensor:
    return ones(ROWS, outputs, dtype=dtype)


def cases(world: int) -> list[Case]:
    x_and_out = {"x": rows(), "out": rows()}
    norm = {"x": rows(), "residual": rows(), "weight": ones(FEATURES)}
    layer = {"x": rows(), "weight": ones(64, FEATURES), "bias": ones(64)}
    gate_up = {"x": rows(), "gate_up_weight": ones(128, FEATURES), "bias": ones(128)}
    summed = {"x": rows(), "linear_weight": ones(64, FEATURES), "bias": ones(64)}
    before_norm = {**summed, "residual": rows(64), "norm_weight": ones(64)}
    experts = {"x": rows(), "gate_up_weight": ones(2, 128, FEATURES), "down_weight": ones(2, FEATURES, 64)}
    experts |= {"topk_weights": torch.ones(ROWS, 1), "topk_ids": torch.ones(ROWS, 1, dtype=torch.int32)}
    routed = {"x": rows(), "router_weight": ones(4, FEATURES), "bias": ones(4)}
    qkv = {"x": rows(), "weight": ones(192, FEATURES), "bias": ones(192)}
    qkv |= {"positions": torch.zeros(ROWS, dtype=torch.int64), "cos_sin": torch.ones(1, 64)}
    of_heads = {"head_size": 64, "kv_heads": 1}
    none = torch.full((world * ROWS, 1), -1, dtype=torch.int32)  # no expert: all ranks agree
    tokens = {"x": rows(), "topk_ids": none[:ROWS], "topk_weights": torch.ones(ROWS, 1)}
    made = {"y": ones(world * ROWS, FEATURES), "ids": none, "topk_ids": none[:ROWS]}
    of_experts = {"num_experts": world}
    sized = {"x": rows(), **{name: torch.full((world,), ROWS // world) for name in ("send_sizes", "recv_sizes")}}
    part = {"max_rows": ROWS // world}  # all rows of a result are written
    written = {"out": rows(), "residual_out": rows()}
    scaled = {"x": rows(dtype=FP8), "linear_weight": ones(64, FEATURES, dtype=FP8), "bias": ones(64)}
    scaled |= {"x_scale": torch.ones(1), "weight_scale": torch.ones(1)}
    out = ("out",)
    same, of_norm = (("out", "x"),), (("residual_out", "residual"), ("residual_out", "x"))
    found = [
        Case("all_reduce", x_and_out, out, same),
        Case("try_all_reduce", x_and_out, out, same),
        Case("all_gather", {"x": rows(), "out": ones(world * ROWS, FEATURES)}, out),
        Case("try_all_gather", {"x": rows()}),
        Case("reduce_scatter", {"x": ones(world * ROWS, FEATURES), "out": rows()}, out),
        Case("try_reduce_scatter", {"x": ones(world * ROWS, FEATURES)}),
        Case("all_to_all", {"x": ones(world * ROWS, FEATURES), "out": ones(world * ROWS, FEATURES)}, out, same),
        Case("try_all_to_all", {"x": ones(world * ROWS, FEATURES)}),
        Case("all_to_all", {**sized, "out": rows()}, out, options=part),
        Case("try_all_to_all", sized, options=part),
        Case("linear", {**layer, "out": rows(64)}, out),
        Case("batch_invariant_linear", {**layer, "out": rows(64)}, out),
        Case("linear_silu_and_mul", {**gate_up, "out": rows(64)}, out),
        Case("linear_gelu_tanh_and_mul", {**gate_up, "out": rows(64)}, out),
        Case("linear_all_reduce", {**summed, "out": rows(64)}, out),
        Case("linear_all_reduce", {**scaled, "out": rows(64)}, out),
        Case(
            "linear_all_reduce_add_rms_norm",
            {**scaled, "residual": rows(64), "norm_weight": ones(64)},
            options={"eps": EPS},
        ),
        Case("try_linear", layer),
        Case("try_linear_silu_and_mul", gate_up),
        Case("try_linear_gelu_tanh_and_mul", gate_up),
        Case("try_linear_all_reduce_add_rms_norm", before_norm, options={"eps": EPS}),
        Case("try_all_reduce_add_rms_norm", {**norm, **written}, tuple(written), (*of_norm, *same), {"eps": EPS}),
        Case("fused_experts", {**experts, "out": rows()}, out, has_operator=False),
        Case("try_fused_experts", experts, has_operator=False),
        Case("moe_route", routed, options={"top_k": 1}, has_operator=False),
        Case("try_moe_route", routed, options={"top_k": 1}, has_operator=False),
        Case("linear_rope", qkv, options=of_heads, has_operator=False),
        Case("try_linear_rope", qkv, options=of_heads, has_operator=False),
        Case("moe_dispatch", {**tokens, "x_scales": torch.ones(ROWS, 3)}, options=of_experts, has_operator=False),
        Case("try_moe_dispatch", tokens, options=of_experts, has_operator=False),
        Case("moe_combine", {**made, "out": rows()}, out, options=of_experts, has_operator=False),
        Case("try_moe_combine", made, options=of_experts, has_operator=False),
        Case("run", {"input": rows(), "output": rows()}, ("output",), has_operator=False),
        Case("dsl", x_and_out, out, same, has_operator=False),
    ]
    for quantize, scale in ((None, {}), ("static", {"scale": torch.ones(1)}), ("dynamic", {"scale": torch.ones(ROWS)})):
        makes = ("scale",) if quantize == "dynamic" else ()
        results = {**written, "out": rows(dtype=BF16 if quantize is None else FP8)}
        in_place = (*of_norm, *same) if quantize is None else of_norm
        options = {"eps": EPS, "quantize": quantize}
        writes = (*written, *makes)
        found.append(Case("all_reduce_add_rms_norm", {**norm, **results, **scale}, writes, in_place, options))
        smaller = {name: tensor[:, :64].contiguous() for name, tensor in results.items()}
        operands = {**before_norm, **smaller, **scale}
        found.append(Case("linear_all_reduce_add_rms_norm", operands, writes, of_norm[:1], options))
    return found


def each(cases: list[Case]) -> Iterator[tuple[Case, str]]:
    for case in cases:
        for name in case.operands:
            yield case, name


def fresh(case: Case, **others: Any) -> Tensors:
    """Operands of a call, of which those that are written are nobody else's."""
    return {**{name: tensor.clone() for name, tensor in case.operands.items()}, **others}


class Walk:
    """The callables of one communicator.

    Attributes:
        cases: All of them.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.cases = cases(comm.world_size)
        self._compiled = dsl.compile(library.one_shot_ll, comm, dtype=BF16, max_bytes=1 << 12)

    def call(self, case: Case, **others: Any) -> Any:
        """Call with some operands in the place of the usual ones."""
        return case.call(self.comm, self._compiled, fresh(case, **others))

    def refuse(self, match: str, case: Case, **others: Any) -> None:
        """Expect an error before anything is sent; what only tries may say None in its place."""
        try:
            result = self.call(case, **others)
        except UnsupportedInputError as error:
            text = str(error)
            assert match in text, f"{case.name} {case.options} of {list(others)}: {text}"
        else:
            told = result is None and case.name.startswith("try_")
            assert told, f"{case.name} {case.options} takes {list(others)}, which should be refused: {match}"


def walk(check: Callable[[Walk], None], cache: str) -> None:
    with pytest.MonkeyPatch.context() as patch, make_communicator(fuse_linear=True) as comm:
        patch.setenv("LLM_COMM_CACHE_DIR", cache)
        with_stand_in(patch)
        walked = Walk(comm)
        for case in walked.cases:
            walked.call(case)  # its sizes are known: the quick way is taken
        check(walked)
        assert comm.all_reduce(torch.ones(30)).eq(comm.world_size).all()
        comm.check()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("kernels"))


# ---- What torch must know --------------------------------------------------------------------------------------------


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor.clone())


def refuse_what_is_lost(walk: Walk) -> None:
    kept: list[torch.Tensor] = []
    for case, name in each(walk.cases):
        tensor = case.operands[name]
        walk.refuse("negated", case, **{name: negated(tensor)})
        if tensor.is_floating_point():
            walk.refuse("requires grad", case, **{name: tensor.clone().requires_grad_()})
            with torch.no_grad():
                walk.call(case, **{name: tensor.clone().requires_grad_()})
            with forward_ad.dual_level():
                match = "tangent" if case.has_operator else "forward-mode"
                walk.refuse(match, case, **{name: forward_ad.make_dual(tensor.clone(), tensor.clone())})
        kept.clear()
        torch.vmap(lambda row: kept.append(row) or row)(torch.stack([tensor] * 2))
        walk.refuse("no memory of its own", case, **{name: kept[0]})
    with pytest.raises(UnsupportedInputError, match=r"channels: memory: .* negated view"):
        walk.comm.channels(torch._neg_view(walk.comm.empty(64, torch.float32)))


class Wrapper(torch.Tensor):
    """Stands for another tensor, as those of torchao do, and has no memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        opened = [argument.inner if isinstance(argument, Wrapper) else argument for argument in arguments]
        return function(*opened, **(options or {}))


def open_wrappers(walk: Walk) -> None:
    """The dispatcher opens what is read, so results are right. What is written is refused, or torch writes it."""
    for case, name in each(walk.cases):
        wrapped = {name: Wrapper(case.operands[name].clone())}
        if not case.has_operator:
            walk.refuse("wrapper", case, **wrapped)
            continue
        if name in case.writes:
            with contextlib.suppress(UnsupportedInputError):
                walk.call(case, **wrapped)
            continue
        results, expected = walk.call(case, **wrapped), walk.call(case)
        for result, right in zip(
            *((one,) if torch.is_tensor(one) else one for one in (results, expected)), strict=True
        ):
            assert result.view(torch.uint8).equal(right.view(torch.uint8)), f"{case.name} of {name}"


class Watcher(TorchDispatchMode):
    """Lists the operators that are called under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*arguments, **(options or {}))


def watch(walk: Walk) -> None:
    """Modes and tracers see a call, or it is refused."""
    for case in walk.cases:
        inputs = {name: tensor for name, tensor in fresh(case).items() if name not in case.writes}
        outputs = {name: tensor for name, tensor in case.operands.items() if name in case.writes}
        if not case.has_operator:
            with Watcher():
                walk.refuse("would miss the call", case)
            torch.vmap(lambda row: walk.refuse("would miss the call", case, **{next(iter(inputs)): row}) or row)(  # noqa: B023
                torch.stack([rows()] * 2)
            )
            continue
        watcher = Watcher()
        with watcher:
            walk.call(case)
        assert sum(name.startswith("llm_comm") for name in watcher.seen) == 1, f"{case.name}: {watcher.seen}"
        first = next(iter(inputs))
        with torch.no_grad():
            graph = make_fx(lambda x: walk.call(case, **{first: x}))(inputs[first])  # noqa: B023
        targets = [str(node.target) for node in graph.graph.nodes]
        assert sum(target.startswith("llm_comm") for target in targets) == 1, f"{case.name}: {targets}"
        assert outputs or not case.writes


# ---- What is written -------------------------------------------------------------------------------------------------


def read_only(like: torch.Tensor) -> torch.Tensor:
    """A tensor in memory to which a store would end the process."""
    with Path("/proc/self/exe").open("rb") as file:
        pages = mmap.mmap(file.fileno(), like.nbytes, prot=mmap.PROT_READ)
    with warnings.catch_warnings(action="ignore"):
        return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(like.shape)


def refuse_what_must_not_be_written(walk: Walk) -> None:
    for case in walk.cases:
        for name in case.writes:
            tensor = case.operands[name]
            with torch.inference_mode():
                of_inference = tensor.clone()
                walk.call(case, **{name: of_inference})
            walk.refuse("made in inference mode", case, **{name: of_inference})
            walk.refuse("read-only memory", case, **{name: read_only(tensor)})
            given = tensor.clone()
            walk.call(case, **{name: given})
            assert given._version == 1, f"{case.name}: torch does not know that {name} is written"


def beside(first: torch.Tensor, second: torch.Tensor, gap_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies in one buffer, the second so many bytes behind the end of the first; of less than 0 they overlap."""
    begin = first.nbytes + gap_bytes
    buffer = torch.zeros(begin + second.nbytes + 16, dtype=torch.uint8)
    placed = []
    for tensor, offset in ((first, 0), (second, begin)):
        inside = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        inside.copy_(tensor)
        placed.append(inside)
    return placed[0], placed[1]


def refuse_overlaps(walk: Walk) -> None:
    """Each pair in both orders, an element into each other, and side by side; what begins where another does."""
    for whole in walk.cases:
        for written, other in itertools.product(whole.writes, whole.operands):
            if written == other:
                continue
            # Nothing else is written: each operand is compared for itself.
            left = {name: one for name, one in whole.operands.items() if name not in whole.writes or name == other}
            case = whole._replace(operands={**left, written: whole.operands[written]})
            for pair in ((written, other), (other, written)):
                first, second = (case.operands[name] for name in pair)
                is_aligned = pair[1] in LAYER_WEIGHTS
                # What lies behind has to be aligned to its elements.
                step = ALIGNMENT if is_aligned else max(first.element_size(), second.element_size())
                apart = -first.nbytes % ALIGNMENT if is_aligned else 0
                walk.call(case, **dict(zip(pair, beside(first, second, apart), strict=True)))
                into = dict(zip(pair, beside(first, second, -min(step, first.nbytes)), strict=True))
                walk.refuse("overlaps", case, **into)
            larger = max(case.operands[written], case.operands[other], key=lambda tensor: tensor.nbytes)
            memory = larger.clone().view(torch.uint8).flatten()
            # Views of the memory: what is compared are not the objects.
            views = {
                name: memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for name, tensor in case.operands.items()
                if name in (written, other)
            }
            if (written, other) in case.same:
                walk.call(case, **views)
            elif case.name not in ("all_gather", "reduce_scatter"):  # in place: test_parts_inputs.py
                walk.refuse("overlaps", case, **views)


CHECKS = (refuse_what_is_lost, open_wrappers, watch, refuse_what_must_not_be_written, refuse_overlaps)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("check", CHECKS)
def test_operands(ranks: RankPool, cache: str, check: Callable[[Walk], None]) -> None:
    ranks.run(2, walk, check, cache)


# ---- Whatever there is -----------------------------------------------------------------------------------------------

#: Methods that take tensors and hand none to the core: they say what would be served.
ANSWERS = ("accepts", "plan")
#: Take tensors by name, or memory of the communicator's own: test_channels.py.
OTHERS = {"channels"}
#: Whoever asks for the address of a tensor hands its memory on, past torch: each has the guard or is behind it.
KNOW_ADDRESSES = {
    "arrays.py",  # compares it with an interface's
    "bench/layer_chains.py",
    "emulated.py",  # in a text
    "integrations/linear.py",  # alignment of a weight
    "integrations/vllm/rope.py",  # whether two tensors are the same memory
    "nodes/*.py",  # run behind the operations of nodes
    "runtime/channels.py",
    "runtime/self_test.py",
    "runtime/symmetric_heap.py",
    "operations/*.py",
    "dsl/compiled.py",
}


def test_every_callable_is_walked() -> None:
    walked = {case.name for case in cases(2)}
    for name, method in inspect.getmembers(Communicator, inspect.isfunction):
        takes = [str(parameter.annotation) for parameter in inspect.signature(method).parameters.values()]
        if name.startswith("_") or not any("Tensor" in annotation or annotation == "Any" for annotation in takes):
            continue
        assert name in walked | OTHERS or name.startswith(ANSWERS), f"Communicator.{name} takes tensors: add a Case"
    for case, name in each(cases(2)):
        method = {"dsl": dsl.Compiled.__call__, "run": None}.get(case.name, getattr(Communicator, case.name, None))
        if method is not None:
            assert name in inspect.signature(method).parameters, f"{case.name} has no operand {name}"


def test_names_of_before_are_the_same_methods() -> None:
    for old, new in (
        ("accepts_fused", "accepts_all_reduce_add_rms_norm"),
        ("plan_fused", "plan_all_reduce_add_rms_norm"),
        ("accepts_fused_linear", "accepts_linear_all_reduce_add_rms_norm"),
    ):
        assert getattr(Communicator, old) is getattr(Communicator, new)


def test_no_tensor_reaches_the_core_past_the_guard() -> None:
    package = Path(llm_comm.__file__).parent
    for path in sorted(package.rglob("*.py")):
        asks = ".data_ptr" in path.read_text(encoding="utf-8")
        known = any(path.relative_to(package).match(pattern) for pattern in KNOW_ADDRESSES)
        assert known or not asks, f"{path.relative_to(package)} asks for data_ptr(): does it pass the guard?"


def check_operators() -> None:
    """Called directly: the operators themselves tell of a derivative that would be lost."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("llm_comm::")]
    assert len(names) >= 13
    for name in names:
        operator = getattr(torch.ops.llm_comm, name.partition("::")[2]).default
        tensors = [one.name for one in operator._schema.arguments if "Tensor" in str(one.type) and one.name != "after"]
        for operand, has_tangent in itertools.product(tensors, (False, True)):
            tensor = torch.ones(4)
            values: dict[str, Any] = {
                "eps": EPS,
                "weight_bias": 1.0,
                "dim": 0,
                "rank": 0,
                "world_size": 2,
                "max_rows": 2,
                "quantize": "group",
            }
            given = [
                tensor
                if one.name in tensors
                else values.get(one.name, "llm_comm.none" if one.name != "sizes" else None)
                for one in operator._schema.arguments
                if one.name not in ("after", "out_dtype")
            ]
            arguments = [one.name for one in operator._schema.arguments]
            place = arguments.index(operand)
            with forward_ad.dual_level():
                lost = (
                    forward_ad.make_dual(tensor, tensor.clone()) if has_tangent else torch.ones(4, requires_grad=True)
                )
                given[place] = lost
                if "out_dtype" in arguments:
                    given.insert(arguments.index("out_dtype"), None)
                with pytest.raises(UnsupportedInputError, match="tangent" if has_tangent else "requires grad"):
                    operator(*given)


def test_operators_called_directly() -> None:
    check_operators()
