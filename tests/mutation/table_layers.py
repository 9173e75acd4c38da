"""Mutants of what tuning tables say of linear layers, and of how it is measured."""

from __future__ import annotations

from mutant import Mutant, python

LAYERS = "llm_comm/planning/layers.py"
TABLES = "llm_comm/planning/tables.py"
TUNE = "llm_comm/bench/tune_layers.py"
CALLS = "llm_comm/operations/linear.py"
SUMS_OF_LAYERS = "llm_comm/operations/linear_all_reduce.py"
LINEAR_BIAS = "tests/emulated/test_linear_bias.py"
SCALING = "llm_comm/operations/fp8.py"

OF_TABLES = "tests/unit/test_layer_tables.py"
OF_TUNE = "tests/unit/test_tune_layers.py"
AT_START = "llm_comm/integrations/layer_tuning.py"
MEASURED = "llm_comm/integrations/measured_tables.py"
OF_START = "tests/unit/test_layer_tuning.py"
OF_MEASURED = "tests/unit/test_measured_tables.py"

LINEAR_LAYERS: tuple[Mutant, ...] = (
    python(
        "a row does not serve the tokens that it was measured with",
        LAYERS,
        "tokens <= row.up_to",
        "tokens < row.up_to",
        OF_TABLES,
    ),
    python(
        "layers are given away whether or not they are faster",
        LAYERS,
        "row is not None and row.is_faster",
        "row is not None",
        OF_TABLES,
    ),
    python(
        "rows with dependent launches serve those without",
        LAYERS,
        "if row.layer() == layer and",
        "if row.layer()[:3] == layer[:3] and",
        OF_TABLES,
    ),
    python(
        "graphs are made for layers that are never given away",
        LAYERS,
        "if row.is_faster and row.pdl == config.pdl",
        "if row.is_faster",
        OF_TABLES,
    ),
    python(
        "layers that no kernel serves are given away",
        LAYERS,
        "and takes_features(outputs) and takes_features(inputs, multiple)",
        "and takes_features(outputs)",
        OF_TABLES,
    ),
    python(
        "layers are given away by size on GPUs where none was measured",
        LAYERS,
        "return limits.compute_capability == _MEASURED_CAPABILITY and limits.sm_count >= _MEASURED_SM_COUNT",
        "return limits.sm_count >= _MEASURED_SM_COUNT",
        OF_TABLES,
    ),
    python(
        "layers are given away by size past a row that says otherwise",
        LAYERS,
        "    if of_layer:\n",
        "    if of_layer and of_layer[0].is_faster:\n",
        OF_TABLES,
    ),
    python(
        "layers of FP8 are given away by rows of bf16",
        LAYERS,
        "return _OF_FP8[operation] if fp8 else operation",
        "return operation",
        "tests/unit/test_tune_layers.py",
    ),
    python(
        "results go over scales that are still read",
        CALLS,
        "else (scaling.x, scaling.weight)",
        "else (scaling.x, None)",
        "tests/emulated/test_linear_fp8.py",
    ),
    python(
        "results go over a bias that is still read",
        CALLS,
        "check_written(x, weight, bias, *scales, out)",
        "check_written(x, weight, None, *scales, out)",
        LINEAR_BIAS,
    ),
    python(
        "a sum loses the bias of its layer",
        SUMS_OF_LAYERS,
        "partial(self._layers.enqueue, prepared, x, weight, y, scaling, bias)",
        "partial(self._layers.enqueue, prepared, x, weight, y, scaling)",
        LINEAR_BIAS,
    ),
    python(
        "a norm loses the bias of the layer before it",
        SUMS_OF_LAYERS,
        "partial(self._layers.enqueue, prepared, x, linear_weight, y, scaling, bias)",
        "partial(self._layers.enqueue, prepared, x, linear_weight, y, scaling)",
        LINEAR_BIAS,
    ),
    python(
        "a bias without memory ends the communicator",
        CALLS,
        "if bias is not None:\n            bias.data_ptr()",
        "pass",
        "tests/emulated/test_operands.py",
    ),
    python(
        "a scale without memory ends the communicator",
        CALLS,
        "scaling.x.data_ptr()\n            scaling.weight.data_ptr()",
        "pass",
        "tests/emulated/test_operands.py",
    ),
    python(
        "graphs take a bias of any length",
        CALLS,
        "and bias.shape[0] == weight.shape[0]",
        "and bias.shape[0] > 0",
        LINEAR_BIAS,
    ),
    python(
        "a bias of another dtype is read as the result's",
        CALLS,
        "if bias.dtype is not dtype:",
        "if False:",
        LINEAR_BIAS,
    ),
    python(
        "a bias that is too short is read beyond its end",
        CALLS,
        "bias.dim() != 1 or bias.shape[0] != weight.shape[0]",
        "bias.dim() != 1",
        LINEAR_BIAS,
    ),
    python(
        "a prepared layer takes any bias",
        CALLS,
        "            or (bias is not None and self._why_not_bias(bias, weight, prepared.dtype))\n",
        "",
        LINEAR_BIAS,
    ),
    python(
        "scales of another dtype are read as fp32",
        SCALING,
        "if scale.dtype is not torch.float32:",
        "if False:",
        "tests/emulated/test_linear_fp8.py",
    ),
    python(
        "layers with scales of blocks go by rows of other scales",
        CALLS,
        'of_factors(self._name, bool(scales), "x_scale_strides" in scales)',
        "of_factors(self._name, bool(scales))",
        OF_TABLES,
    ),
    python(
        "a prepared layer takes scales of blocks of any strides",
        SCALING,
        "return x.shape, x.stride(), weight.shape, self.out_dtype",
        "return x.shape, weight.shape, self.out_dtype",
        "tests/emulated/test_linear_blocks.py",
    ),
    python(
        "layers that run alike differ by what was measured",
        TABLES,
        "layers = tuple(row.without_figures() for row in self.layers)",
        "layers = self.layers",
        OF_TABLES,
    ),
    python(
        "a row that a device has no room for ends the call",
        CALLS,
        "except ValueError as error:\n            # The row was measured",
        "except KeyError as error:\n            # The row was measured",
        OF_TABLES,
    ),
    python(
        "slower layers are given away",
        TUNE,
        "is_slower(other_us, us)",
        "is_slower(us, other_us)",
        OF_TUNE,
    ),
    python(
        "gate and up become rows of plain layers",
        TUNE,
        "LINEAR_SILU_AND_MUL if measured.silu else LINEAR",
        "LINEAR",
        OF_TUNE,
    ),
    python(
        "a choice counts that is no better than noise",
        TUNE,
        "(us is None or is_slower(us, best.result.us))",
        "(us is None or us > best.result.us)",
        OF_TUNE,
    ),
    python(
        "a table forgets the layers that were not measured",
        "llm_comm/planning/tables.py",
        "(*(row for row in self.layers if row.layer() not in replaced), *rows)",
        "(*rows,)",
        OF_TUNE,
    ),
    python(
        "the fastest rank counts at the start of an engine",
        AT_START,
        "max(times[tiling] for times in timed)",
        "min(times[tiling] for times in timed)",
        OF_START,
    ),
    python(
        "a layer is given away that is faster by no more than repeated runs differ",
        AT_START,
        "us * (1 + _MARGIN) < theirs",
        "us < theirs",
        OF_START,
    ),
    python(
        "layers are measured that the table has",
        AT_START,
        "if key not in known",
        "if True",
        OF_START,
    ),
    python(
        "layers are measured that llm_comm has no kernels for",
        AT_START,
        "if not layer.why_not",
        "if True",
        OF_START,
    ),
    python(
        "shared GPUs are measured",
        "llm_comm/integrations/engine_config.py",
        'device.type == "cuda" and not config.share_gpu',
        'device.type == "cuda"',
        OF_START,
    ),
    python(
        "what other kernels have measured counts",
        MEASURED,
        "(self._device, self._kernels):",
        '(self._device, found.measured.get("kernels")):',
        OF_MEASURED,
    ),
    python(
        "a directory that cannot be written ends the start of an engine",
        MEASURED,
        "except OSError as error:",
        "except KeyError as error:",
        OF_MEASURED,
    ),
    python(
        "processes that write one file write into one another's",
        "llm_comm/files.py",
        'f".{target.name}.{os.getpid()}.partial"',
        'f".{target.name}.partial"',
        OF_MEASURED,
    ),
    python(
        "rows of sums for larger messages are lost",
        "llm_comm/integrations/collective_tuning.py",
        "table.with_rows(*rows, *larger)",
        "table.with_rows(*rows)",
        "tests/emulated/test_sums_at_start.py",
    ),
    python(
        "sums are measured where a table is of the machine",
        "llm_comm/integrations/collective_tuning.py",
        "0 if model is None or communicator.table.origin.is_tuned else model.hidden",
        "0 if model is None else model.hidden",
        "tests/emulated/test_sums_at_start.py",
    ),
)
