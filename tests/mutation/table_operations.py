"""Mutants of the communicator's calls: what fits, what is kept, what is done."""

from __future__ import annotations

from mutant import Edit, Mutant, python

FUSED = "llm_comm/operations/all_reduce_add_rms_norm.py"
PLAIN = "llm_comm/operations/all_reduce.py"
GENERIC = "llm_comm/operations/generic.py"
OPERATION = "llm_comm/operations/operation.py"
OPERATORS = "llm_comm/operations/torch_operators.py"
QUANTIZATION = "llm_comm/operations/quantization.py"
COMMUNICATOR = "llm_comm/communicator.py"
ARRAYS = "llm_comm/arrays.py"

OVERLAPS = "tests/emulated/test_overlaps.py"
TABLES_IN_USE = "tests/emulated/test_use_table.py"
MISFITS = "tests/emulated/test_fused.py -k test_tensor_that_does_not_fit"
DECLINED = "tests/emulated/test_fused.py -k test_declined_input"
INPUTS = "tests/emulated/test_inputs.py"
OF_ARRAYS = "tests/unit/test_outputs_of_arrays.py"
KEPT = "tests/unit/test_operation.py"
GENERIC_CALLS = "tests/emulated/test_generic.py -k test_parameters_and_rows"


def keys(name: str, file: str, old: str, new: str, kept: str, kept_new: str, *checks: str) -> Mutant:
    """Of a key that a cache is asked by, and of the same where it is filled."""
    return Mutant(name, (Edit(file, old, new), Edit(file, kept, kept_new)), checks)


ASKED = "prepared = self._prepared.get((x.numel(), weight.numel(), x.dtype, eps, quantize))"
FILLED = "keep(self._prepared, (x.numel(), weight.numel(), x.dtype, eps, quantize), prepared)"


def without(part: str, name: str) -> Mutant:
    return keys(name, FUSED, ASKED, ASKED.replace(part, ""), FILLED, FILLED.replace(part, ""), TABLES_IN_USE)


OPERATIONS: tuple[Mutant, ...] = (
    # ---- Overlaps ----
    python(
        "fused: the last element of another tensor may be written",
        FUSED,
        "if start < other_start + extent(other)",
        "if start < other_start + extent(other) - other.element_size()",
        OVERLAPS,
    ),
    python(
        "fused: the first element of another tensor may be written",
        FUSED,
        "other_start < start + tensor.nbytes:",
        "other_start < start + tensor.nbytes - tensor.element_size():",
        OVERLAPS,
    ),
    python(
        "fused: neighbours overlap",
        FUSED,
        "if start < other_start + extent(other)",
        "if start <= other_start + extent(other)",
        OVERLAPS,
    ),
    python(
        "fused: FP8 may begin where x does",
        FUSED,
        "start == other_start and tensor.nbytes == other.nbytes and",
        "start == other_start and",
        OVERLAPS,
    ),
    python(
        "fused: out may be the residual",
        FUSED,
        '_MAY_BE_THE_SAME = {("out", "x"),',
        '_MAY_BE_THE_SAME = {("out", "x"), ("out", "residual"),',
        OVERLAPS,
    ),
    python(
        "fused: out is not compared with the scale",
        FUSED,
        '_check_apart("out", out, x=x, residual=residual, weight=weight, scale=scale)',
        '_check_apart("out", out, x=x, residual=residual, weight=weight)',
        OVERLAPS,
    ),
    python(
        "fused: residual_out is not compared with out",
        FUSED,
        "weight=weight, out=out, scale=scale)",
        "weight=weight, scale=scale)",
        OVERLAPS,
    ),
    python(
        "fused: a residual written in place may overlap x",
        FUSED,
        "if residual is not None and (out is x or residual_out is residual):",
        "if residual is not None and out is x:",
        OVERLAPS,
        MISFITS,
    ),
    python(
        "out may begin with the last element of x", PLAIN, "< x.nbytes\n", "< x.nbytes - x.element_size()\n", OVERLAPS
    ),
    python(
        "a buffer's last element may be written",
        OPERATION,
        "a.data_ptr() < b.data_ptr() + extent(b) and",
        "a.data_ptr() < b.data_ptr() + extent(b) - b.element_size() and",
        OVERLAPS,
    ),
    python(
        "a buffer's first element may be written",
        OPERATION,
        "and b.data_ptr() < a.data_ptr() + extent(a)",
        "and b.data_ptr() < a.data_ptr() + extent(a) - a.element_size()",
        OVERLAPS,
    ),
    # ---- What is kept ----
    without(" weight.numel(),", "a cached fused call ignores the length of rows"),
    without(" x.dtype,", "a cached fused call ignores the type"),
    without(" eps,", "a cached fused call ignores epsilon"),
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
        "self._planner.message_limit(FUSED)",
        'self._planner.message_limit("all_reduce")',
        TABLES_IN_USE,
    ),
    python(
        "a traced fused call of the largest size is declined",
        FUSED,
        "count * element_size <= self._planner.message_limit(FUSED)",
        "count * element_size < self._planner.message_limit(FUSED)",
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
        "            and quantization.takes(quantize, row, dimensions)\n",
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
        "scale.numel() == count",
        "scale.numel() >= count",
        MISFITS,
    ),
    python("a scale may be of any type", QUANTIZATION, "scale.dtype is torch.float32 and", "", MISFITS),
    python(
        "scales of groups may have other strides",
        QUANTIZATION,
        "size == 1 or found == wanted",
        "True",
        "tests/emulated/test_fused_groups.py -k test_what_does_not_fit",
    ),
    python(
        "what lies between columns of scales may be written",
        OPERATION,
        "if tensor.is_contiguous():",
        "if True:",
        "tests/emulated/test_fused_groups.py -k test_what_does_not_fit",
    ),
    python(
        "a scale without quantization is passed over",
        FUSED,
        "if scale is not None:\n                raise _error(_SCALE_ALONE)",
        "if False:\n                raise _error(_SCALE_ALONE)",
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
        '            check_memory("all_reduce", x=x, out=out)\n            self._handle.end_for(error)\n',
        '            check_memory("all_reduce", x=x, out=out)\n',
        "tests/emulated/test_watchdog.py -k test_an_operation_that_is_not_launched",
    ),
    python(
        "a dynamic scale is not copied to the caller's",
        OPERATORS,
        "scale if makes_scales(quantize) else None)",
        "None)",
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
    python(
        "arrays of JAX are written", ARRAYS, "if is_read_only or library in _IMMUTABLE:", "if is_read_only:", OF_ARRAYS
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
