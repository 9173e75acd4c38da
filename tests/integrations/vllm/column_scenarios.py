"""Linear layers that are split by columns, in graphs of vLLM's compiler: run by ``test_vllm_columns.py``, as
``scenarios.py`` is by its test.

The layers and the activation are vLLM's own, and ``compiler_harness.py`` compiles them. Where results are compared to
the bit, data and weights are small whole numbers: a layer's result is then the same in any order of summation.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from compiler_harness import HIDDEN, Compiler, Model, compiler, compiler_config, matches, norms
from linear_scenarios import COLUMN_PASS, LINEAR_PASS, expect_no_linear, linear_layer, use_table
from rank_processes import data, dist_rank, scenario
from scenarios import parallel_state, tensor_model_parallel_all_reduce
from torch._inductor.fx_passes import post_grad
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear

from llm_comm.integrations.vllm import compiled_graphs
from llm_comm.planning.layers import LINEAR, LINEAR_SILU_AND_MUL, LayerRow

#: Of a rank: those of qkv, and of gate as of up.
OUTPUTS = 128
QKV, GATE_UP = (OUTPUTS, HIDDEN), (2 * OUTPUTS, HIDDEN)

# ---- What is replaced -----------------------------------------------------------------------------------------------


@scenario(smoke=True, LLM_COMM_FUSE_LINEAR="1")
def layers_become_operators() -> None:
    check_a_models_layers(compiler_config())


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_become_operators_where_silu_and_mul_is_one_of_vllm() -> None:
    check_a_models_layers(compiler_config(custom_ops=["+silu_and_mul"]))


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_of_gemma_become_operators() -> None:
    check_a_models_layers(compiler_config(), "gelu_tanh_and_mul")


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_of_gemma_become_operators_where_the_activation_is_one_of_vllm() -> None:
    check_a_models_layers(compiler_config(custom_ops=["+gelu_and_mul"]), "gelu_tanh_and_mul")


def activation_of(name: str) -> Any:
    return SiluAndMul() if name == "silu_and_mul" else GeluAndMul(approximate="tanh")


def check_a_models_layers(config: VllmConfig, activation: str = "silu_and_mul") -> None:
    with compiler(config) as vllm:
        qkv, gate_up, activate = column_layer(), gate_up_layer(), activation_of(activation)
        o_proj, down_proj = linear_layer(), linear_layer(inputs=OUTPUTS)
        first, second, third = norms(1e-5, 1e-6, 3e-6)

        def model(x: torch.Tensor) -> Any:
            normed, residual = second(o_proj(qkv(first(x))), x * 1)
            end, _ = third(down_proj(activate(gate_up(normed))), residual)
            # The last one has a batch of one sequence, as models of transformers are given.
            return end, qkv(normed), activate(gate_up((x * 2).unsqueeze(0)))

        expect_columns(vllm, model, linear=2, activated=2, rows=2)
        called = [("linear", QKV), (f"linear_{activation}", GATE_UP)] * 2
        assert vllm.column_calls == [(name, (4, HIDDEN), weight) for name, weight in called], vllm.column_calls

        is_rank_0 = dist_rank() == 0
        said = (
            "llm_comm computes 4 of 4 column-parallel linear layers of a graph for batches of 1 to 64 tokens, 2 of them"
        )
        assert len(vllm.log.having(said)) == is_rank_0
        for said in (
            "llm_comm: first column-parallel linear layer computed by llm_comm (2 ranks, shape (4, 64), weight (128, ",
            f"llm_comm: first column-parallel linear layer computed with {activation.replace('_', '-')} (2 ranks, ",
        ):
            assert len(vllm.log.having(said)) == is_rank_0
        assert len(vllm.log.having("first column-parallel linear layer")) == 2 * is_rank_0


@scenario(LLM_COMM_FUSE_LINEAR="1")
def results_are_those_of_llm_comm() -> None:
    with compiler() as vllm:
        for dtype in (torch.bfloat16, torch.float16):
            check_results(vllm, dtype, "silu_and_mul")
            check_results(vllm, dtype, "gelu_tanh_and_mul")


def check_results(vllm: Compiler, dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(7 + dist_rank())
    qkv, gate_up, activate = column_layer(dtype=dtype), gate_up_layer(dtype=dtype), activation_of(activation)
    for layer in (qkv, gate_up):
        layer.weight.data = torch.randn(layer.weight.shape).to(dtype)
    x = torch.randn(5, HIDDEN).to(dtype)

    def model(x: torch.Tensor) -> Any:
        return qkv(x * 1), activate(gate_up(x * 2))

    vllm.column_calls.clear()
    plain, activated = vllm.trace(model, 64)(x)
    assert [name for name, *_ in vllm.column_calls] == ["linear", f"linear_{activation}"]
    ours = parallel_state.get_tp_group().device_communicator._llm_comm
    assert torch.equal(plain, ours.linear(x, qkv.weight.data))
    assert torch.equal(activated, getattr(ours, f"linear_{activation}")(x * 2, gate_up.weight.data))
    # By what rounding changes a number at most, and a little for sums in fp32.
    rounding = 1.01 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(plain.double(), x.double() @ qkv.weight.double().t(), rtol=rounding, atol=1e-5)
    gate, up = ours.linear(x * 2, gate_up.weight.data).double().chunk(2, -1)
    exact = F.silu(gate) if activation == "silu_and_mul" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(activated.double(), exact * up, rtol=rounding, atol=1e-5)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def a_bias_goes_with_its_layer() -> None:
    with compiler() as vllm:
        qkv, gate_up, silu_and_mul = column_layer(bias=True), gate_up_layer(bias=True), SiluAndMul()
        in_fp32, halves = torch.arange(OUTPUTS).float(), column_layer(bias=True)

        def model(x: torch.Tensor) -> Any:
            return (
                qkv(x),
                qkv((x * 2).unsqueeze(0)),
                silu_and_mul(gate_up(x * 3)),
                silu_and_mul(gate_up((x * 4).unsqueeze(0))),
                # As inductor writes it on GPUs before pointwise operators.
                halves.bias + x @ halves.weight.t(),
                silu_and_mul(x @ gate_up.weight.t() + gate_up.bias),
                # Of this the layer alone is llm_comm's, without bias.
                x @ halves.weight.t() + in_fp32,
            )

        expect_columns(vllm, model, linear=4, activated=3)
        torch.manual_seed(7 + dist_rank())
        for layer in (qkv, gate_up):
            layer.weight.data = torch.randn(layer.weight.shape).bfloat16()
        x = torch.randn(5, HIDDEN).bfloat16()
        plain, _, activated, _, _, written, alone = vllm.trace(model, 64)(x)
        ours = parallel_state.get_tp_group().device_communicator._llm_comm
        assert torch.equal(plain, ours.linear(x, qkv.weight.data, bias=qkv.bias.data))
        weight, bias = gate_up.weight.data, gate_up.bias.data
        assert torch.equal(activated, ours.linear_silu_and_mul(x * 3, weight, bias=bias))
        assert torch.equal(written, ours.linear_silu_and_mul(x, weight, bias=bias))
        assert torch.equal(alone, ours.linear(x, halves.weight.data) + in_fp32)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def a_bias_that_inductor_has_taken_apart_goes_with_its_layer() -> None:
    """Through inductor, as on a GPU with older versions of torch, before pointwise operators."""
    with compiler(compiler_config(norms_by="native")) as vllm:
        from llm_comm.integrations.vllm import linear_passes  # needs vLLM's compiler, set up

        gate_up, silu_and_mul = gate_up_layer(bias=True), SiluAndMul()
        targets: list[Any] = []

        def model(x: torch.Tensor) -> Any:
            return silu_and_mul(gate_up(x * 2))

        with (
            mock.patch.object(post_grad, "is_gpu", return_value=True),
            torch._inductor.config.patch(keep_addmm_fused_for_half_dtypes=False),
            mock.patch.object(
                linear_passes, "_replace_with_activation", wraps=linear_passes._replace_with_activation
            ) as replace,
        ):
            replace.side_effect = lambda _, node, __: targets.append(node.args[0].target) or mock.DEFAULT
            vllm.check(vllm.compile(model), model)
        assert set(targets) == {torch.ops.aten.add.Tensor}, targets  # in graphs of two ranges of batches
        assert [name for name, *_ in vllm.column_calls] == ["linear_silu_and_mul"], vllm.column_calls


@scenario()
def a_table_says_which_layers_and_batches() -> None:
    """Through inductor, as for a model: one graph for the batches that the table prefers, and one for larger ones."""
    use_table(
        [
            row(LINEAR, OUTPUTS, 4, True),
            row(LINEAR, OUTPUTS, 8, False),
            row(LINEAR_SILU_AND_MUL, OUTPUTS, 6, True),
            row(LINEAR, 2 * OUTPUTS, 8, True),
        ]
    )
    config = compiler_config(norms_by="native")
    before = config.compilation_config.compile_ranges_endpoints
    with compiler(config) as vllm:
        assert config.compilation_config.compile_ranges_endpoints == [8, *before]
        qkv, gate_up, not_measured = column_layer(), gate_up_layer(), column_layer(3 * OUTPUTS)
        silu_and_mul = SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            return qkv(x * 1), silu_and_mul(gate_up(x * 2)), F.gelu(gate_up(x * 3)), not_measured(x * 4)

        compiled = vllm.compile(model)
        plain, activated = ("linear", QKV), ("linear_silu_and_mul", GATE_UP)
        of_gate_up = ("linear", GATE_UP)
        for rows, called in (
            (4, [plain, activated, of_gate_up]),
            (6, [activated, of_gate_up]),
            (8, [of_gate_up, of_gate_up]),  # the layer without its activation is still preferred
            (9, []),
        ):
            vllm.column_calls.clear()
            vllm.check(compiled, model, rows)
            wanted = sorted((name, (rows, HIDDEN), weight) for name, weight in called)
            assert sorted(vllm.column_calls) == wanted, (rows, vllm.column_calls)
        # Larger batches have no operators at all.
        group = parallel_state.get_tp_group().device_communicator
        with mock.patch.object(type(group), "_try_linear", side_effect=AssertionError):
            vllm.check(compiled, model, 9)
        assert matches(COLUMN_PASS) == 3
        said = "llm_comm computes 3 of 4 column-parallel linear layers of a graph for batches of 1 to 8 tokens, 1 of"
        assert len(vllm.log.having(said)) == (dist_rank() == 0)
        assert len(vllm.log.having("column-parallel linear layers of a graph")) == (dist_rank() == 0)


# ---- What is not ----------------------------------------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_that_llm_comm_does_not_compute_are_left_alone() -> None:
    with compiler() as vllm:
        layer, with_bias, odd = column_layer(), column_layer(bias=True), column_layer(96)
        transposed, wide = column_layer(HIDDEN), column_layer(dtype=torch.float32)
        bias, one = with_bias.bias, torch.ones(1, dtype=torch.bfloat16)
        transposed.weight.data = transposed.weight.data.t()

        def model(x: torch.Tensor) -> Any:
            whole = torch.cat([x, x], -1)
            return (
                odd(x),
                transposed(x),
                wide(x.float()),
                x @ transposed.weight,
                # A weight that a kernel ahead has written, and rows that lie apart.
                F.linear(x, layer.weight * 2),
                layer(whole[:, :HIDDEN]),
                # A bias that a kernel ahead has written, one for all outputs, and factors.
                F.linear(x, layer.weight, bias * 2),
                F.linear(x, layer.weight, one),
                torch.addmm(bias, x, layer.weight.t(), alpha=2),
                torch.addmm(bias, x, layer.weight.t(), beta=2),
            )

        expect_columns(vllm, model, linear=0)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def layers_that_are_summed_are_left_to_the_other_pass() -> None:
    with compiler() as vllm:
        layer = linear_layer(HIDDEN, reduce_results=False)
        first, second = norms(1e-5, 1e-6)

        def model(x: torch.Tensor) -> Any:
            both = layer(x * 3)
            return (
                # Sums without a norm, of rows as they are and split.
                tensor_model_parallel_all_reduce(layer(x)),
                tensor_model_parallel_all_reduce(layer(x * 2).view(-1, 2, HIDDEN // 2)),
                parallel_state.get_tp_group().reduce_scatter(layer(x * 7), 1),
                # With norms: one goes into the operator, of the other something else takes the result as well.
                first(tensor_model_parallel_all_reduce(both), x * 4),
                both,
                second(tensor_model_parallel_all_reduce(layer(x * 5)), x * 6),
            )

        def flat(x: torch.Tensor) -> Any:
            *sums, normed, both, last = model(x)
            return *sums, *normed, both, *last

        expect_columns(vllm, flat, linear=0, rows=1)


@scenario(LLM_COMM_FUSE_LINEAR="1")
def what_is_no_silu_and_mul_of_a_layer_is_left_alone() -> None:
    """The layers alone are llm_comm's."""
    with compiler() as vllm:
        gate_up, silu_and_mul = gate_up_layer(), SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            used_twice, swapped, parts = gate_up(x), gate_up(x * 2), gate_up(x * 3)
            used_in_two_shapes = gate_up(x * 5)
            return (
                silu_and_mul(used_twice),
                used_twice,
                swapped[:, :OUTPUTS] * F.silu(swapped[:, OUTPUTS:]),
                F.silu(parts[:, :64]) * parts[:, 64:128],
                silu_and_mul(torch.cat([x, x * 2], -1)),
                silu_and_mul(gate_up(x * 4).view(-1, OUTPUTS)),
                silu_and_mul(used_in_two_shapes.view(1, -1, 2 * OUTPUTS)),
                used_in_two_shapes,
            )

        expect_columns(vllm, model, linear=5)


@scenario(world=4, LLM_COMM_FUSE_LINEAR="1")
def stages_of_a_pipeline_ask_their_own_group() -> None:
    with compiler(tensor_parallel=2, pipeline_parallel=2) as vllm:
        qkv, gate_up, silu_and_mul = column_layer(), gate_up_layer(), SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            summed = parallel_state.get_pp_group().all_reduce(qkv(x * 2))
            return summed, qkv(x), silu_and_mul(gate_up(x))

        expect_columns(vllm, model, linear=1, activated=1)


# ---- Nothing is left out when the kernel declines -------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="1")
def what_is_declined_is_computed_all_the_same() -> None:
    with compiler() as vllm:
        qkv, gate_up, silu_and_mul = column_layer(), gate_up_layer(), SiluAndMul()

        def model(x: torch.Tensor) -> Any:
            return qkv(x), silu_and_mul(gate_up(x * 2))

        def exactly(tokens: int) -> list[torch.Tensor]:
            x = data((tokens, HIDDEN))
            gate, up = F.linear(x * 2, gate_up.weight).chunk(2, -1)
            return [F.linear(x, qkv.weight), F.silu(gate) * up]

        compiled = vllm.trace(model, 64)
        for tokens, served in ((65, 0), (64, 2), (0, 0)):
            vllm.column_calls.clear()
            got = vllm.check(compiled, model, tokens)
            assert len(vllm.column_calls) == served
            assert served or all(map(torch.equal, got, exactly(tokens)))

        vllm.column_calls.clear()
        x, operators = data((8, HIDDEN)), torch.ops.llm_comm_vllm
        given = [t.clone() for t in (x, qkv.weight, gate_up.weight)]
        plain = (None, None, None, None, "tp:0")  # without bias and scales
        want = operators.linear(x, qkv.weight, *plain), operators.linear_silu_and_mul(x, gate_up.weight, *plain)
        assert len(vllm.column_calls) == 2
        for t, before in zip((x, qkv.weight, gate_up.weight), given, strict=True):
            assert torch.equal(t, before), "an input of an operator was changed"
        # A weight that begins at an odd place is read by torch, and rows that lie apart are.
        is_rank_1 = dist_rank() == 1
        weights = [shifted(layer.weight) if is_rank_1 else layer.weight for layer in (qkv, gate_up)]
        apart = torch.cat([x, x], -1)[:, :HIDDEN]
        for its_x, served in ((x, not is_rank_1), (apart, False)):
            vllm.column_calls.clear()
            assert torch.equal(operators.linear(its_x, weights[0], *plain), want[0])
            activated = operators.linear_silu_and_mul(its_x, weights[1], *plain)
            torch.testing.assert_close(activated, want[1], rtol=0.02, atol=0)
            assert len(vllm.column_calls) == 2 * served
        # Without a communicator of llm_comm, the graph is as right.
        parallel_state.get_tp_group().device_communicator._llm_comm = None
        vllm.column_calls.clear()
        got = vllm.check(compiled, model, 8)
        assert all(map(torch.equal, got, exactly(8)))
        assert not vllm.column_calls


# ---- Switches and caches --------------------------------------------------------------------------------------------


@scenario(LLM_COMM_FUSE_LINEAR="0")
def a_variable_switches_linear_layers_off() -> None:
    use_table([row(LINEAR, OUTPUTS, 8, True), row(LINEAR_SILU_AND_MUL, OUTPUTS, 8, True)])
    expect_none()


@scenario()
def without_a_row_graphs_are_as_before() -> None:
    expect_none()


@scenario(LLM_COMM_FUSE_LINEAR="1")
def one_rank_that_lacks_the_pass_takes_the_others_along() -> None:
    missing = {"llm_comm.integrations.vllm.linear_passes": None} if dist_rank() == 1 else {}
    with mock.patch.dict("sys.modules", missing):
        expect_no_linear("linear layers are vLLM's: rank 1 (global rank 1): it cannot be set up in vLLM")


@scenario()
def compiled_graphs_are_kept_apart_by_the_layers_that_they_hold() -> None:
    with compiler() as vllm:
        for name in ("linear", "linear_silu_and_mul"):
            assert hasattr(torch.ops.llm_comm_vllm, name), "a graph from the cache needs it"
        group = parallel_state.get_tp_group().device_communicator
        communicator = group._llm_comm
        plain, activated = row(LINEAR, OUTPUTS, 8, True), row(LINEAR_SILU_AND_MUL, OUTPUTS, 8, True)
        keys, passes = set(), set()
        choices = [(plain,), (activated,), (plain, activated), (plain, activated._replace(is_faster=False))]
        for layers in choices:
            communicator.use_table(communicator.table._replace(layers=layers))
            again = compiler_config()
            with set_current_vllm_config(again):
                assert group._set_up_fusion(communicator)
                keys.add(again.compute_hash())
                backend = vllm._replace(config=again).backend()
                backend.configure_post_pass()
            found = {type(its_pass).__name__: its_pass for its_pass in backend.pass_manager.passes}
            passes.add(found[COLUMN_PASS].uuid())
            with pass_context(Range(1, 8)):
                keys.add(backend.pass_manager.uuid())
        assert (len(keys), len(passes)) == (2 * len(choices), len(choices))
        in_the_passes = {its_pass.__module__.rpartition(".")[2] + ".py" for its_pass in map(type, found.values())}
        assert {"fusion_pass.py", "linear_passes.py"} <= in_the_passes & {*compiled_graphs._SOURCES}


# ---- What they are made of ------------------------------------------------------------------------------------------


def column_layer(
    outputs: int = OUTPUTS, dtype: torch.dtype = torch.bfloat16, bias: bool = False
) -> ColumnParallelLinear:
    """Of so many outputs on each rank, where the weights are others."""
    world = parallel_state.get_tp_group().world_size
    layer = ColumnParallelLinear(HIDDEN, world * outputs, params_dtype=dtype, bias=bias, return_bias=False)
    return with_whole_numbers(layer)


def gate_up_layer(dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> MergedColumnParallelLinear:
    outputs = parallel_state.get_tp_group().world_size * OUTPUTS
    layer = MergedColumnParallelLinear(HIDDEN, [outputs] * 2, params_dtype=dtype, bias=bias, return_bias=False)
    return with_whole_numbers(layer)


def with_whole_numbers(layer: Any) -> Any:
    torch.manual_seed(dist_rank())
    layer.weight.data = torch.randint(-1, 2, layer.weight.shape).to(layer.weight.dtype)
    if layer.bias is not None:
        layer.bias.data = torch.randint(-9, 10, layer.bias.shape).to(layer.bias.dtype)
    return layer


def shifted(weight: torch.Tensor) -> torch.Tensor:
    """The same at an odd place."""
    return torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight).copy_(weight)


def row(operation: str, outputs: int, up_to: int, is_faster: bool) -> LayerRow:
    """Of a tuning table, without dependent launches as in vLLM."""
    return LayerRow(operation, outputs, HIDDEN, pdl=False, up_to=up_to, is_faster=is_faster)


def expect_columns(vllm: Compiler, model: Model, linear: int, activated: int = 0, rows: int = 0) -> None:
    """Compiles and runs ``model``, of whose layers ``linear`` become operators alone, ``activated`` do so with their
    activation, and ``rows`` with their norm."""
    vllm.column_calls.clear()
    vllm.linear_calls.clear()
    before = matches(COLUMN_PASS), matches(LINEAR_PASS)
    vllm.check(vllm.trace(model, 64), model)
    replaced = matches(COLUMN_PASS) - before[0], matches(LINEAR_PASS) - before[1]
    assert replaced == (linear + activated, rows), replaced
    names = [name for name, *_ in vllm.column_calls]
    called = names.count("linear"), len(names) - names.count("linear"), len(vllm.linear_calls)
    assert called == (linear, activated, rows), called


def expect_none() -> None:
    """All layers are vLLM's."""
    with compiler() as vllm:
        backend = vllm.backend()
        backend.configure_post_pass()
        assert COLUMN_PASS not in [type(its_pass).__name__ for its_pass in backend.pass_manager.passes]
        qkv, gate_up, silu_and_mul = column_layer(), gate_up_layer(), SiluAndMul()
        expect_columns(vllm, lambda x: (qkv(x), silu_and_mul(gate_up(x * 2))), linear=0)
