"""Mutants of the communicator's calls: what fits, what is kept, what is done."""

from __future__ import annotations

from mutant import Edit, Mutant, python

FUSED = "llm_comm/operations/all_reduce_add_rms_norm.py"
PLAIN = "llm_comm/operations/all_reduce.py"
GENERIC = "llm_comm/operations/generic.py"
OPERATION = "llm_comm/operations/operation.py"
OPERANDS = "llm_comm/operations/operands.py"
LAYERS = "llm_comm/operations/linear_layers.py"
PROGRAMS = "llm_comm/dsl/compiled.py"
OPERATORS = "llm_comm/operations/torch_operators.py"
QUANTIZATION = "llm_comm/operations/fp8.py"
SHARDS = "llm_comm/operations/shards.py"
PARTS = "llm_comm/operations/all_to_all_v.py"
COMMUNICATOR = "llm_comm/communicator.py"
ARRAYS = "llm_comm/arrays.py"

GUARD = "tests/emulated/test_operands.py"
WIRE = "tests/emulated/test_wire.py -k lossy_all_gathers"
TABLES_IN_USE = "tests/emulated/test_use_table.py"
MISFITS = "tests/emulated/test_fused.py -k test_tensor_that_does_not_fit"
DECLINED = "tests/emulated/test_fused.py -k test_declined_input"
INPUTS = "tests/emulated/test_inputs.py"
OF_ARRAYS = "tests/unit/test_outputs_of_arrays.py"
KEPT = "tests/unit/test_operation.py"
OF_PARTS = "tests/emulated/test_all_to_all_v.py -k"
GENERIC_CALLS = "tests/emulated/test_generic.py -k test_parameters_and_rows"


def keys(name: str, file: str, old: str, new: str, kept: str, kept_new: str, *checks: str) -> Mutant:
    """Of a key that a cache is asked by, and of the same where it is filled."""
    return Mutant(name, (Edit(file, old, new), Edit(file, kept, kept_new)), checks)


ASKED = "prepared = self._prepared.get((x.numel(), weight.numel(), x.dtype, eps, weight_bias, quantize))"
FILLED = "keep(self._prepared, (x.numel(), weight.numel(), x.dtype, eps, weight_bias, quantize), prepared)"


def without(part: str, name: str) -> Mutant:
    return keys(name, FUSED, ASKED, ASKED.replace(part, ""), FILLED, FILLED.replace(part, ""), TABLES_IN_USE)


OPERATIONS: tuple[Mutant, ...] = (
    # ---- Parts whose sizes are on the device ----
    python(
        "out ends where x would",
        PARTS,
        "output_begin + result.nbytes,",
        "output_begin + x.nbytes,",
        f"{OF_PARTS} output",
    ),
    python(
        "a call with sizes of int32 is kept for int64",
        PARTS,
        "key = (x.shape[1:], x.dtype, send_sizes.dtype, most)",
        "key = (x.shape[1:], x.dtype, most)",
        f"{OF_PARTS} sizes_of_another_type",
    ),
    python(
        "queries of a compiler forget that the option bounds all parts together",
        PARTS,
        "nbytes *= self.world_size",
        "pass",
        f"{OF_PARTS} choice",
    ),
    # ---- Lossy all-gathers ----
    python(
        "lossy all-gathers of any size are quantized",
        SHARDS,
        "if wire_of(problem, self._planner.config):",
        "if self._planner.config.wire == 'fp8':",
        WIRE,
    ),
    python(
        "prepared lossy all-gathers outlive their table",
        COMMUNICATOR,
        "self._operations.lossy_all_gather.forget()",
        "pass",
        WIRE,
    ),
    # ---- Overlaps ----
    python(
        "what is written may begin at the last element of another tensor",
        OPERANDS,
        "begin >= other_end or",
        "begin + tensor.element_size() >= other_end or",
        GUARD,
    ),
    python(
        "what is written may end with the first element of another tensor",
        OPERANDS,
        "or other_begin >= end:",
        "or other_begin >= end - tensor.element_size():",
        GUARD,
    ),
    python("neighbours overlap", OPERANDS, "begin >= other_end or", "begin > other_end or", GUARD),
    python(
        "what is written may be a tensor of inference mode anywhere",
        OPERANDS,
        "if tensor.is_inference() and not torch.is_inference_mode_enabled():",
        "if False:",
        GUARD,
    ),
    python("what has no operator is lost to modes", OPERANDS, "if is_watched():", "if False:", GUARD),
    python("what has no operator takes wrappers", OPERANDS, "type(tensor) not in PLAIN_WEIGHTS:", "False:", GUARD),
    python(
        "operands that are read lose gradients",
        OPERANDS,
        "    return why_not_constant(tensor)\n",
        '    return ""\n',
        GUARD,
    ),
    python(
        "an operator that is called directly loses gradients",
        OPERATORS,
        "check_constant(name, **dict(zip(names, arguments, strict=False)))",
        "pass",
        GUARD,
    ),
    python(
        "a mode misses a layer of any batch",
        LAYERS,
        "type(bias) not in _PLAIN or _is_watched() ): result: torch.Tensor = linear_operators.linear(",
        "type(bias) not in _PLAIN ): result: torch.Tensor = linear_operators.linear(",
        GUARD,
    ),
    python("what a DSL kernel writes is the same version", PROGRAMS, "count_write(written)", "pass", GUARD),
    python(
        "fused: FP8 may begin where x does",
        FUSED,
        "_IN_PLACE_UNQUANTIZED if quantize is None else _IN_PLACE",
        "_IN_PLACE_UNQUANTIZED",
        GUARD,
    ),
    python(
        "fused: out may be the residual",
        FUSED,
        '_IN_PLACE_UNQUANTIZED = {("out", "x"): 0,',
        '_IN_PLACE_UNQUANTIZED = {("out", "x"): 0, ("out", "residual"): 0,',
        GUARD,
    ),
    python("fused: scales may overlap what is read", FUSED, "_MAKING_SCALES if makes_scales else", "", GUARD),
    python("fused: scales alone are not checked", FUSED, "or (makes_scales and scale is not None)", "", GUARD),
    python("out may begin with the last element of x", PLAIN, "< x.nbytes\n", "< x.nbytes - x.element_size()\n", GUARD),
    # ---- What is kept ----
    without(" weight.numel(),", "a cached fused call ignores the length of rows"),
    without(" x.dtype,", "a cached fused call ignores the type"),
    without(" eps,", "a cached fused call ignores epsilon"),
    without(" weight_bias,", "a cached fused call ignores weight_bias"),
    python(
        "a compiled fused call ignores weight_bias",
        OPERATORS,
        "operator(*operands.values(), eps, weight_bias,",
        "operator(*operands.values(), eps, 0.0,",
        "tests/emulated/test_fused_compile.py",
    ),
    python(
        "a norm behind a linear layer ignores weight_bias",
        "llm_comm/operations/linear_all_reduce.py",
        "y, residual, norm_weight, eps, weight_bias,",
        "y, residual, norm_weight, eps, 0.0,",
        "tests/emulated/test_linear_inputs.py -k test_what_only_tries",
    ),
    python(
        "a call that only tries to norm ignores weight_bias",
        "llm_comm/operations/all_reduce_ops.py",
        "*operands, weight_bias=weight_bias,",
        "*operands,",
        "tests/emulated/test_linear_inputs.py -k test_what_only_tries",
    ),
    without(", quantize", "a cached fused call ignores the quantization"),
    without("x.numel(), ", "a cached fused call ignores the size"),
    python(
        "a kept plan ignores the length of rows",
        FUSED,
        "key = (x.numel(), weight.numel(), x.dtype, quantize)",
        "key = (x.numel(), 0, x.dtype, quantize)",
        TABLES_IN_USE,
    ),
    keys(
        "a cached all-reduce ignores the type",
        PLAIN,
        "prepared = self._prepared.get((count, dtype))",
        "prepared = next((kept for key, kept in self._prepared.items() if key[0] == count), None)",
        "key = (x.numel(), x.dtype)",
        "key = (x.numel(), x.dtype)  #",
        TABLES_IN_USE,
    ),
    python(
        "a cached call of another operation ignores parameters",
        GENERIC,
        "key = (x.numel(), row, x.dtype, in_order)",
        "key = (x.numel(), row, x.dtype, ())",
        GENERIC_CALLS,
    ),
    python(
        "kept plans outlive their table",
        FUSED,
        "super().forget()\n        self._plans.clear()",
        "super().forget()",
        TABLES_IN_USE,
    ),
    python("prepared calls outlive their table", OPERATION, "self._prepared.clear()", "pass", TABLES_IN_USE),
    python(
        "use_table keeps what is prepared",
        COMMUNICATOR,
        "self._planner.table = table\n        self._forget()",
        "self._planner.table = table",
        TABLES_IN_USE,
    ),
    python(
        "use_table keeps the all-reduces",
        COMMUNICATOR,
        "self._operations.all_reduce.forget()\n        self",
        "self",
        TABLES_IN_USE,
    ),
    python(
        "use_table keeps the fused calls",
        COMMUNICATOR,
        "self._operations.all_reduce_add_rms_norm.forget()",
        "pass",
        TABLES_IN_USE,
    ),
    python("use_table keeps the calls by name", COMMUNICATOR, "self._other_operations.forget()", "pass", KEPT),
    python("calls by name outlive their table", GENERIC, "operation.forget()", "pass", KEPT),
    python(
        "what is kept grows for ever", OPERATION, "if len(cache) >= MAX_PREPARED:\n        cache.clear()", "pass", KEPT
    ),
    python("one more is kept", OPERATION, "if len(cache) >= MAX_PREPARED:", "if len(cache) > MAX_PREPARED:", KEPT),
    python("nothing is kept", OPERATION, "cache[key] = value", "pass", KEPT, TABLES_IN_USE),
    # ---- What is accepted ----
    python(
        "a traced fused call has no limit of its own",
        FUSED,
        "self._planner.fuses(count * element_size)",
        'count * element_size <= self._planner.message_limit("all_reduce")',
        TABLES_IN_USE,
    ),
    python(
        "a traced fused call of the largest size is declined",
        FUSED,
        "self._planner.fuses(count * element_size)",
        "self._planner.fuses(count * element_size + 1)",
        TABLES_IN_USE,
    ),
    python(
        "a traced call of the largest size is declined",
        PLAIN,
        "or nbytes <= limit",
        "or nbytes < limit",
        TABLES_IN_USE,
    ),
    python(
        "a traced fused call takes any rows",
        FUSED,
        "and self._info.takes_rows_of(row)\n",
        "\n",
        TABLES_IN_USE,
    ),
    python(
        "a traced fused call takes any quantization",
        FUSED,
        "            and fp8.takes(quantize, row, dimensions)\n",
        "",
        "tests/emulated/test_traced_answers.py",
    ),
    python(
        "a traced fused call takes a weight of another type",
        FUSED,
        "            and weight.dtype == x.dtype\n            and weight.dim() == 1\n            and x.dim() > 0",
        "            and weight.dim() == 1\n            and x.dim() > 0",
        "tests/emulated/test_traced_answers.py",
    ),
    python(
        "a traced fused call takes a weight of other length",
        FUSED,
        "            and x.dim() > 0\n            and x.shape[-1] == weight.numel()\n",
        "            and x.dim() > 0\n",
        "tests/emulated/test_traced_answers.py",
    ),
    python(
        "a traced call takes any type",
        PLAIN,
        "is_input = arrays.is_dense_on(x, self._device) and x.dtype in self._data_types",
        "is_input = arrays.is_dense_on(x, self._device)",
        "tests/emulated/test_traced_answers.py",
    ),
    python(
        "a prepared fused call takes strided rows",
        FUSED,
        "            and x.is_contiguous()\n",
        "",
        "tests/emulated/test_traced_answers.py",
        DECLINED,
    ),
    python(
        "a prepared fused call takes a strided weight",
        FUSED,
        "            and weight.is_contiguous()\n",
        "",
        "tests/emulated/test_traced_answers.py",
        DECLINED,
    ),
    python(
        "a prepared fused call takes a weight of another type",
        FUSED,
        "weight.dtype is x.dtype\n",
        "True\n",
        "tests/emulated/test_traced_answers.py",
        DECLINED,
    ),
    python(
        "a prepared fused call takes rows of other length",
        FUSED,
        "            and weight.dim() == 1\n            and x.shape[-1] == weight.numel()\n            and not",
        "            and weight.dim() == 1\n            and not",
        "tests/emulated/test_traced_answers.py",
        DECLINED,
    ),
    python(
        "a prepared fused call takes negated views",
        FUSED,
        "            and not x.is_neg()\n",
        "",
        "tests/emulated/test_traced_answers.py",
    ),
    python(
        "a prepared all-reduce takes strided tensors",
        PLAIN,
        "            or not x.is_contiguous()\n            or x.is_neg()\n        ):\n            found",
        "            or x.is_neg()\n        ):\n            found",
        "tests/emulated/test_traced_answers.py",
        INPUTS,
    ),
    python(
        "a prepared all-reduce takes negated views",
        PLAIN,
        "            or not x.is_contiguous()\n            or x.is_neg()\n        ):\n            found",
        "            or not x.is_contiguous()\n        ):\n            found",
        "tests/emulated/test_traced_answers.py",
    ),
    python(
        "a static scale may have many elements",
        QUANTIZATION,
        "fits = scale.numel() == count",
        "fits = scale.numel() >= count",
        MISFITS,
    ),
    python(
        "a scale may be of any type",
        QUANTIZATION,
        "if fits and scale.dtype is dtype and",
        "if fits and",
        MISFITS,
    ),
    python(
        "scales of groups may have other strides",
        QUANTIZATION,
        "size == 1 or found == wanted",
        "True",
        "tests/emulated/test_fused_groups.py -k test_what_does_not_fit",
    ),
    python(
        "what lies between columns of scales may be written",
        OPERANDS,
        "if tensor.is_contiguous():",
        "if True:",
        "tests/emulated/test_fused_groups.py -k test_what_does_not_fit",
    ),
    python(
        "a scale without quantization is passed over",
        FUSED,
        "elif scale is not None:\n            raise _error(_SCALE_ALONE)",
        "elif False:\n            raise _error(_SCALE_ALONE)",
        MISFITS,
    ),
    python(
        "an error of a call is not raised",
        PLAIN,
        "if not is_enqueued:\n            self._handle.check()",
        "pass",
        "tests/emulated/test_mismatch.py -k test_calls_in_another_order",
    ),
    python(
        "an error of a fused call is not raised",
        FUSED,
        "if not enqueued:\n            self._handle.check()",
        "pass",
        "tests/emulated/test_mismatch.py -k test_fused_calls",
    ),
    python(
        "an operation that is not launched ends nothing",
        PLAIN,
        '            check_memory("all_reduce", x=x, out=out)\n'
        "            self._handle.end_after_launch_error(error)\n",
        '            check_memory("all_reduce", x=x, out=out)\n',
        "tests/emulated/test_watchdog.py -k test_an_operation_that_is_not_launched",
    ),
    python(
        "a dynamic scale is not copied to the caller's",
        OPERATORS,
        "given = (out, residual_out, scale if makes_scales(quantize) else None)",
        "given = (out, residual_out, None)",
        "tests/emulated/test_fused_compile.py",
        INPUTS,
    ),
    # ---- Arrays ----
    python(
        "a read-only __cuda_array_interface__ is written",
        ARRAYS,
        '(interface is not None and interface["data"][1])',
        "False",
        OF_ARRAYS,
    ),
    python(
        "every __cuda_array_interface__ is read-only",
        ARRAYS,
        '(interface is not None and interface["data"][1])',
        "interface is not None",
        OF_ARRAYS,
    ),
    python("read-only flags are passed over", ARRAYS, 'not getattr(flags, "writeable", True) or', "", OF_ARRAYS),
    python("arrays of JAX are written", ARRAYS, "or library in _IMMUTABLE or", "or", OF_ARRAYS),
    python("DLPack's flag is passed over", ARRAYS, "flags & _READ_ONLY", "flags & 0", OF_ARRAYS),
    python(
        "an array that is summed in place is written though read-only",
        ARRAYS,
        "written = as_output(out)",
        "written = as_tensor(out)",
        "tests/emulated/test_arrays.py",
    ),
    python(
        "memory of another device is taken for one of the current",
        ARRAYS,
        'if tensor.data_ptr() == interface["data"][0]:',
        "if True:",
        OF_ARRAYS,
    ),
    python(
        "negative strides are handed to torch",
        ARRAYS,
        "if any(stride < 0 for",
        "if any(stride < -(1 << 40) for",
        OF_ARRAYS,
    ),
)
