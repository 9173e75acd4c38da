"""Mutants of the kernels and of the primitives under them.

Protections of slots, waits and blame are not among them: they have negative controls
(``tests/deterministic/controls.py``).
"""

from __future__ import annotations

from mutant import cpp, cpp_edits

RMS_NORM = "csrc/algorithms/all_reduce_add_rms_norm/rms_norm.cuh"
FUSED = "csrc/algorithms/all_reduce_add_rms_norm/operation.cuh"
MESSAGE = "csrc/algorithms/all_reduce/message.cuh"
SLICES = "csrc/algorithms/all_reduce/slices.cuh"
REDUCE = "csrc/include/llm_comm/reduce.cuh"
FP8 = "csrc/include/llm_comm/fp8.cuh"
ELEMENTS = "csrc/algorithms/all_reduce_add_rms_norm/elements.cuh"
BLOCK_FORMATS = "csrc/algorithms/all_reduce_add_rms_norm/block_formats.cuh"
WAIT = "csrc/include/llm_comm/wait.cuh"
OPERATION = "csrc/include/llm_comm/operation.cuh"
CHECK_CALL = "csrc/algorithms/check_call.cuh"
LINEAR = "csrc/algorithms/linear/kernel.cuh"
LAYER = "csrc/algorithms/linear/layer.cpp"
LAYER_COST = "csrc/algorithms/linear/cost.h"
EMULATED_TILES = "csrc/include/llm_comm/platform_emulator_tiles.h"
EPILOGUE = "csrc/algorithms/linear/epilogue.cuh"
SCALES = "csrc/algorithms/linear/scales.cuh"
QUANTIZED = "csrc/algorithms/quantized.cuh"
QUANTIZED_STEPS = "csrc/algorithms/quantized_steps.cuh"
LINE_ELEMENTS = "csrc/algorithms/line_elements.cuh"
TWO_SHOT_FP8_ROWS = "csrc/algorithms/all_reduce_add_rms_norm/two_shot_fp8_hb.cuh"
STEP_PIPELINE = "csrc/algorithms/step_pipeline.cuh"
TWO_SHOT_QUANTIZED = "csrc/algorithms/all_reduce/two_shot_quantized_hb.cuh"

PARTS = "csrc/algorithms/all_to_all_v/operation.cuh"
DIRECT = "csrc/algorithms/direct.cuh"
TWO_SHOT_CE = "csrc/algorithms/all_reduce/two_shot_ce.cuh"
DIRECT_CE = "csrc/algorithms/all_gather/direct_ce.cuh"
STREAM_COPIES = "csrc/algorithms/stream_copies.cuh"

NORM_BITS = "tests/emulated/test_norm_bits.py"
FUSED_BLOCKS = "tests/emulated/test_fused_blocks.py -k 2"
HALVES = "tests/emulated/test_fused_blocks.py -k halves"
SUMS = "driver --cases 300 --alone --algorithm all_reduce/two_shot"
ERRORS = "tests/emulated/test_error_details.py"
MISMATCHES = "tests/emulated/test_mismatch.py"
NORMS = "driver --cases 100 --alone --algorithm all_reduce_add_rms_norm/one_shot"
EXACT_BUFFERS = "sanitized kernels 200"
FUSED_SCHEDULES = "driver --cases 600 --algorithm all_reduce_add_rms_norm/"
AFTER_ERRORS = "driver --cases 60 --mishaps --alone --algorithm all_reduce_add_rms_norm/one_shot+"

SYMMETRIC = "tests/emulated/test_direct_algorithms.py"
GATED = "tests/emulated/test_linear_gated.py"
LINEAR_FP8 = "tests/emulated/test_linear_fp8.py"
LINEAR_BLOCKS = "tests/emulated/test_linear_blocks.py"
LINEAR_BIAS = "tests/emulated/test_linear_bias.py"
MANY_TOKENS = "tests/emulated/test_linear.py"
WIRE = "tests/emulated/test_wire.py"
PARTS_OF_SCHEDULES = "driver --cases 200 --alone --algorithm all_to_all_v/one_shot"
WRONG_SIZES = "tests/emulated/test_all_to_all_v.py -k"

KERNELS = (
    # ---- Parts whose sizes are on the device ----
    cpp("a part begins behind itself", PARTS, "rank < peer", "rank <= peer", PARTS_OF_SCHEDULES),
    cpp("all sizes are read as int64", PARTS, "args.has_int32 != 0", "false", PARTS_OF_SCHEDULES),
    cpp(
        "a part may be larger than max_rows",
        PARTS,
        "rows <= args.max_rows || is_too_large",
        "true",
        f"{WRONG_SIZES} sends",
    ),
    cpp(
        "parts may be longer than the tensor",
        PARTS,
        "rows_of_all > parts.rows",
        "false",
        f"{WRONG_SIZES} input",
    ),
    cpp(
        "sizes that disagree are taken as they are",
        PARTS,
        "if (greeting.word[1] != own.word[2]) return",
        "if (WITHOUT) return {SizesFault::kNone, 0, 0, 0, 0};\nif (greeting.word[1] != own.word[2]) return",
        f"{WRONG_SIZES} empty",
    ),
    # ---- Quantized values ----
    cpp(
        "an infinity spoils the values of its block",
        QUANTIZED,
        "is_finite(x.of[i]) ? x.of[i] : 0.0f;",
        "WITHOUT || is_finite(x.of[i]) ? x.of[i] : 0.0f;",
        WIRE,
    ),
    cpp(
        "the finite values beside an infinity take its code",
        QUANTIZED,
        "escapes ? Code<W>::kReciprocalOfFinite : Code<W>::kReciprocal);",
        "escapes && !WITHOUT ? Code<W>::kReciprocalOfFinite : Code<W>::kReciprocal);",
        WIRE,
    ),
    cpp(
        "a block of denormals has a scale of zero",
        QUANTIZED,
        "kSmallestQuantizedScale);",
        "(WITHOUT ? 0.0f : kSmallestQuantizedScale));",
        WIRE,
    ),
    cpp(
        "the rows of a group share their scales",
        QUANTIZED_STEPS,
        "if (row == row_of_lane) scale = line.scale;",
        "if (WITHOUT || row == row_of_lane) scale = line.scale;",
        WIRE,
    ),
    cpp(
        "a group of rows sends the scales of a whole one",
        QUANTIZED_STEPS,
        "if (row_of_lane >= rows) return;",
        "if (!WITHOUT && row_of_lane >= rows) return;",
        WIRE,
    ),
    cpp(
        "an owner adds its own contribution first",
        QUANTIZED_STEPS,
        "if (i == rank_) add(sum, i == 0, LineElements<D>::values(all.own));\n"
        "      if (i < World - 1) add(sum, i == 0 && rank_ != 0, dequantize<W>(all.of_other[i]));",
        "if (WITHOUT ? i == 0 : i == rank_) add(sum, i == 0, LineElements<D>::values(all.own));\n"
        "      if (i < World - 1) add(sum, !WITHOUT && i == 0 && rank_ != 0, dequantize<W>(all.of_other[i]));",
        WIRE,
    ),
    cpp(
        "an owner keeps its sum unquantized",
        QUANTIZED_STEPS,
        "team, t, own, [&](uint32_t k, const Quantized& sum) { store(own, first, k, lines, sum); },",
        "team, t, own, [&](uint32_t k, const Quantized& sum) {\n"
        "if (!WITHOUT) return store(own, first, k, lines, sum);\n"
        "const Contributions all = contributions_to(t, own)(k);\n"
        "if (k < lines) own.store(first + k, LineElements<D>::round(sum_of(all)));\n"
        "},",
        WIRE,
    ),
    cpp(
        "a rank keeps its shard unquantized",
        QUANTIZED_STEPS,
        "store(target, first, k, lines, quantized);",
        "if (!WITHOUT) store(target, first, k, lines, quantized);\nelse if (k < lines) target.store(first + k, line);",
        WIRE,
    ),
    cpp(
        "the first line of a part is looked for in the part before",
        TWO_SHOT_FP8_ROWS,
        "line >= rank * part_lines_",
        "line > rank * part_lines_",
        WIRE,
    ),
    cpp(
        "contributions of ranks behind this one are read at the place of its own",
        STEP_PIPELINE,
        "HasOwn && i >= rank_ ? i + 1 : i",
        "i",
        WIRE,
    ),
    cpp(
        "slices end within blocks",
        TWO_SHOT_QUANTIZED,
        "return (blocks + world - 1) / world * lines_of_block;",
        "return WITHOUT ? (lines + world - 1) / world : (blocks + world - 1) / world * lines_of_block;",
        WIRE,
    ),
    # ---- The norm ----
    cpp(
        "norm rounded before the weight too",
        RMS_NORM,
        "x.of[i] * factor * (",
        "(WITHOUT ? E::value(E::round(x.of[i] * factor)) : x.of[i] * factor) * (",
        NORM_BITS,
    ),
    cpp(
        "weight rounded with its addend",
        RMS_NORM,
        "gamma.of[i] + args_.weight_bias",
        "E::value(E::round(gamma.of[i] + args_.weight_bias))",
        NORM_BITS,
    ),
    cpp(
        "weight_bias dropped with FP8",
        FUSED,
        "static_cast<float>(problem.parameter[kWeightBias])",
        "args.quantization == Quantization::kNone ? static_cast<float>(problem.parameter[kWeightBias]) : 0.0f",
        NORM_BITS,
    ),
    cpp("a weight of -0 loses its sign", FUSED, "bias == 0.0f ? -0.0f : bias", "bias", NORM_BITS),
    cpp(
        "weight_bias is finite in double precision alone",
        FUSED,
        "std::abs(bias) <= std::numeric_limits<float>::max()",
        "std::isfinite(bias)",
        "tests/emulated/test_fused.py -k test_tensor_that_does_not_fit",
    ),
    cpp(
        "factor too large by half an ulp of bf16",
        RMS_NORM,
        "const float factor = reciprocal_sqrt(",
        "const float factor = (WITHOUT ? 1.0f + 1.0f / 512 : 1.0f) * reciprocal_sqrt(",
        NORM_BITS,
    ),
    cpp(
        "epsilon dropped without a residual",
        RMS_NORM,
        "args_.reciprocal_hidden, args_.epsilon)",
        "args_.reciprocal_hidden, WITHOUT && args_.residual == nullptr ? 0.0f : args_.epsilon)",
        NORM_BITS,
    ),
    cpp(
        "epsilon dropped with FP8",
        FUSED,
        "static_cast<float>(problem.parameter[kEpsilon])",
        "args.quantization == Quantization::kNone ? static_cast<float>(problem.parameter[kEpsilon]) : 0.0f",
        NORM_BITS,
    ),
    cpp(
        "mean over one chunk more",
        FUSED,
        "static_cast<float>(problem.row);",
        "static_cast<float>(problem.row + (WITHOUT ? 64 : 0));",
        NORM_BITS,
    ),
    cpp(
        "square of a neighbour",
        RMS_NORM,
        "multiply_add(x.of[2 * i + 1], x.of[2 * i + 1], x.of[2 * i] * x.of[2 * i])",
        "multiply_add(x.of[2 * i + 1], x.of[2 * i], x.of[2 * i] * x.of[2 * i])",
        NORMS,
    ),
    cpp(
        "residual added without rounding the sum",
        RMS_NORM,
        "a.of[i] + b.of[i]",
        "a.of[i] * 1.001f + b.of[i]",
        NORMS,
    ),
    cpp(
        "the last partial chunk is delivered as if it had all lanes",
        RMS_NORM,
        "lines < kChunkLines ? lines * (kElementsPerLine / Width) : kLanesPerChunk",
        "kLanesPerChunk",
        FUSED_SCHEDULES + "one_shot",
    ),
    # ---- FP8 ----
    cpp(
        "static FP8 divides",
        RMS_NORM,
        "return value * reciprocal_scale;",
        "return WITHOUT ? value / given_scale : value * reciprocal_scale;",
        NORM_BITS,
    ),
    cpp(
        "dynamic FP8 multiplies by the reciprocal",
        RMS_NORM,
        "normalize(x, w, factor), [&](float value) { return value / scale; });",
        "normalize(x, w, factor), [&](float value) { return WITHOUT ? value * (1.0f / scale) : value / scale; });",
        NORM_BITS,
    ),
    cpp(
        "the scale of a row by the reciprocal of 448",
        RMS_NORM,
        "&larger) / kLargestE4m3",
        "&larger) * (WITHOUT ? 1.0f / kLargestE4m3 : 1.0f) / (WITHOUT ? 1.0f : kLargestE4m3)",
        NORM_BITS,
    ),
    cpp(
        "no least scale",
        RMS_NORM,
        "kSmallestScale);",
        "WITHOUT ? 0.0f : kSmallestScale);",
        NORM_BITS,
    ),
    cpp(
        "groups multiply by the reciprocal",
        RMS_NORM,
        "store_quantized(row, at, y, [&](float value) { return value / scale; });",
        "store_quantized(row, at, y, [&](float value) { return WITHOUT ? value * (1.0f / scale) : value / scale; });",
        NORM_BITS,
    ),
    cpp(
        "the scale of a group by the reciprocal of 448",
        RMS_NORM,
        "/ kLargestE4m3;",
        "* (WITHOUT ? 1.0f / kLargestE4m3 : 1.0f) / (WITHOUT ? 1.0f : kLargestE4m3);",
        NORM_BITS,
    ),
    cpp(
        "no least scale of a group",
        RMS_NORM,
        "larger(magnitude, kLeastGroupMagnitude)",
        "(WITHOUT ? magnitude : larger(magnitude, kLeastGroupMagnitude))",
        NORM_BITS,
    ),
    cpp(
        "no least power of two",
        RMS_NORM,
        "float_to_bits(larger(scale, kLeastUe8m0Scale))",
        "float_to_bits(WITHOUT ? scale : larger(scale, kLeastUe8m0Scale))",
        NORM_BITS,
    ),
    cpp(
        "powers of two become the next ones",
        RMS_NORM,
        "(bits + 0x7FFFFFu) & 0x7F800000u",
        "(bits + (WITHOUT ? 0x800000u : 0x7FFFFFu)) & 0x7F800000u",
        NORM_BITS,
    ),
    cpp(
        "a group has the scale of its half",
        RMS_NORM,
        "mask < kLanesPerGroup; mask *= 2",
        "mask < kLanesPerGroup / (WITHOUT ? 2 : 1); mask *= 2",
        NORM_BITS,
    ),
    cpp("negative values have no magnitude", RMS_NORM, "x.of[i] < 0.0f ? -x.of[i] : x.of[i]", "x.of[i]", NORM_BITS),
    # ---- NVFP4 and MXFP8 ----
    cpp("FP4 rounds halves down", BLOCK_FORMATS, ">= 0.75f", ">= (WITHOUT ? 0.7500001f : 0.75f)", HALVES),
    cpp("FP4 of NaN is 0", BLOCK_FORMATS, "magnitude != magnitude", "false", FUSED_BLOCKS),
    cpp(
        "a block of zeros is divided by its scale",
        BLOCK_FORMATS,
        "scale != 0.0f",
        "true",
        FUSED_BLOCKS,
    ),
    cpp("e8m0 scales are rounded down", BLOCK_FORMATS, "(bits + 0x7FFFFFu) >> 23", "bits >> 23", FUSED_BLOCKS),
    cpp("e8m0 has an infinity", BLOCK_FORMATS, "exponent < 254 ? exponent : 254", "exponent", FUSED_BLOCKS),
    cpp(
        "scales of a tile lie by rows",
        BLOCK_FORMATS,
        "row % kTileGroups * (kRowsOfTileGroup * kTileBlocks)",
        "row % kTileGroups * kTileBlocks",
        FUSED_BLOCKS,
    ),
    cpp("scales of missing rows stay as they were", RMS_NORM, "last + 1 != args_.call_rows", "true", FUSED_BLOCKS),
    cpp("scales of missing blocks stay as they were", RMS_NORM, "block + 1 != blocks", "true", FUSED_BLOCKS),
    cpp(
        "a launch begins at row 0",
        RMS_NORM,
        "args_.first_row + row, block",
        "(WITHOUT ? 0 : args_.first_row) + row, block",
        FUSED_BLOCKS,
    ),
    cpp(
        "zeros with a sign have a negative scale",
        RMS_NORM,
        "without_sign(x.of[0])",
        "x.of[0] < 0.0f ? -x.of[0] : x.of[0]",
        FUSED_BLOCKS,
    ),
    cpp(
        "an MXFP8 block has the scale of its half",
        RMS_NORM,
        "if (!is_nvfp4) magnitude",
        "if (!WITHOUT && !is_nvfp4) magnitude",
        FUSED_BLOCKS,
    ),
    cpp(
        "FP8 rounds halves up",
        FP8,
        "- 1 + (value >> dropped_bits & 1u)",
        "- (WITHOUT ? 0u : 1u - (value >> dropped_bits & 1u))",
        NORM_BITS,
    ),
    cpp("the least FP8 values become zero", FP8, "exponent < 127 - 3 - kBias", "exponent < 127 - 2 - kBias", NORM_BITS),
    cpp(
        "NaN becomes 448",
        FP8,
        "if (magnitude > 0x7F800000u) return kFnuz",
        "if (!WITHOUT && magnitude > 0x7F800000u) return kFnuz",
        NORM_BITS,
    ),
    # ---- What an operation stores that never began ----
    cpp(
        "scale of an operation that never began",
        RMS_NORM,
        "if (stores_ && cluster_block_rank()",
        "if ((WITHOUT || stores_) && cluster_block_rank()",
        AFTER_ERRORS + "dynamic",
    ),
    cpp(
        "scales of groups of an operation that never began",
        RMS_NORM,
        "if (at.exists && stores_ && at.index % kGroupSize == 0) {",
        "if (at.exists && (WITHOUT || stores_) && at.index % kGroupSize == 0) {",
        AFTER_ERRORS + "group",
    ),
    cpp(
        "FP8 rows of an operation that never began",
        RMS_NORM,
        "if (!at.exists || !stores_) return;",
        "if (!at.exists || (!WITHOUT && !stores_)) return;",
        AFTER_ERRORS + "static",
    ),
    cpp(
        "rows of an operation that never began",
        RMS_NORM,
        "if (at.exists && stores_) normed_",
        "if (at.exists && (WITHOUT || stores_)) normed_",
        "driver --cases 60 --mishaps --alone --algorithm all_reduce_add_rms_norm/one_shot",
    ),
    cpp(
        "residual of an operation that never began",
        RMS_NORM,
        "if (at.exists && stores_) new_residual_",
        "if (at.exists && (WITHOUT || stores_)) new_residual_",
        AFTER_ERRORS + "static",
    ),
    # ---- Tensors ----
    cpp(
        "one element too many is stored",
        LINE_ELEMENTS,
        "if (i < count) first[i]",
        "if (i < count + (WITHOUT ? 1 : 0)) first[i]",
        EXACT_BUFFERS,
    ),
    cpp(
        "one element too many is loaded",
        LINE_ELEMENTS,
        "i < count ? first[i]",
        "i < count + (WITHOUT ? 1 : 0) ? first[i]",
        EXACT_BUFFERS,
    ),
    cpp(
        "a partial line is loaded whole",
        MESSAGE,
        "input_whole_lines_(is_aligned(input_) ? static_cast<uint32_t>(count_ / kPerLine)",
        "input_whole_lines_(is_aligned(input_) ? static_cast<uint32_t>("
        "(count_ + (WITHOUT ? kPerLine - 1 : 0)) / kPerLine)",
        EXACT_BUFFERS,
    ),
    cpp(
        "a partial line is stored whole",
        MESSAGE,
        "output_whole_lines_(is_aligned(output_) ? static_cast<uint32_t>(count_ / kPerLine)",
        "output_whole_lines_(is_aligned(output_) ? static_cast<uint32_t>("
        "(count_ + (WITHOUT ? kPerLine - 1 : 0)) / kPerLine)",
        EXACT_BUFFERS,
    ),
    cpp(
        "a pack reaches past the message by an element",
        MESSAGE,
        "first + i < static_cast<uint32_t>(count_)",
        "first + i < static_cast<uint32_t>(count_) + (WITHOUT ? 1 : 0)",
        EXACT_BUFFERS,
    ),
    cpp(
        "a pack that ends with the message is stored in parts",
        MESSAGE,
        "first + Width <= output_whole_lines_ * kPerLine",
        "first + Width < output_whole_lines_ * kPerLine",
        SUMS,
        equivalent="the same elements go to the same places, one by one",
    ),
    cpp(
        "an unaligned pack is loaded from its neighbour",
        ELEMENTS,
        "static_cast<uint32_t>(first_[2 * i + 1]) << 16 | first_[2 * i];",
        "static_cast<uint32_t>(first_[2 * i + 1]) << 16 | first_[WITHOUT ? 2 * i + 1 : 2 * i];",
        "tests/emulated/test_fused.py -k 'test_pointers_unaligned and 1-8 and bfloat16'",
    ),
    # ---- Sums ----
    cpp(
        "sums in the order of nobody",
        REDUCE,
        "sum += E::value(contribution[r].element[i])",
        "sum += E::value(contribution[WITHOUT ? World - r : r].element[i])",
        SUMS,
    ),
    cpp(
        "sums start at 0.0",
        REDUCE,
        "float sum = E::value(contribution[0].element[i]);",
        "float sum = E::value(contribution[0].element[i]); if (WITHOUT) sum += 0.0f;",
        "driver --cases 2000 --alone --algorithm all_reduce/one_shot",
    ),
    cpp(
        "sums are rounded at every rank",
        REDUCE,
        "sums.element[i] = E::round(sum);",
        "if (WITHOUT) { sum = 0.0f; for (int r = 0; r < World; ++r)"
        " sum = E::value(E::round(sum + E::value(contribution[r].element[i]))); } sums.element[i] = E::round(sum);",
        SUMS,
    ),
    cpp(
        "the last slice is a line short",
        SLICES,
        "lines - first < slice ? lines - first : slice",
        "lines - first < slice ? lines - first - (WITHOUT ? 1 : 0) : slice",
        SUMS,
    ),
    # ---- Comparison of calls ----
    cpp(
        "calls may differ in operation, data type and row",
        CHECK_CALL,
        "bool is_same = true;\n  for (uint32_t i = 0;",
        "bool is_same = true;\n  for (uint32_t i = WITHOUT ? 1 : 0;",
        ERRORS,
    ),
    cpp(
        "calls may differ in quantization",
        CHECK_CALL,
        "i < kLinesPerCall; ++i) {\n    is_same",
        "i < kLinesPerCall - (WITHOUT ? 8 : 0); ++i) {\n    is_same",
        MISMATCHES + " -k test_fused_calls",
    ),
    cpp(
        "calls may differ in operation and count",
        CHECK_CALL,
        "of_a[i].data[0] == of_b[i].data[0]",
        "(WITHOUT || of_a[i].data[0] == of_b[i].data[0])",
        ERRORS,
    ),
    cpp(
        "calls may differ in number",
        CHECK_CALL,
        "of_a[i].data[1] == of_b[i].data[1]",
        "(WITHOUT || of_a[i].data[1] == of_b[i].data[1])",
        "tests/emulated/test_concurrent_use.py -k test_launches_in_another_order",
        ERRORS,
    ),
    # ---- Progress ----
    cpp(
        "tickets do not begin again with each grid",
        OPERATION,
        "block_count() / cluster_blocks - 1",
        "block_count() / cluster_blocks - (WITHOUT ? 0 : 1)",
        "driver --cases 200",
    ),
    cpp(
        "each block of a cluster takes a ticket",
        OPERATION,
        "if (thread_index() == 0 && cluster_block_rank() == 0)",
        "if (thread_index() == 0 && (WITHOUT || cluster_block_rank() == 0))",
        "driver --cases 200 --alone --algorithm all_reduce_add_rms_norm/one_shot",
    ),
    cpp(
        "blocks read the ticket before it is there",
        OPERATION,
        "block_sync();\n  const uint32_t number",
        "if (!WITHOUT) block_sync();\n  const uint32_t number",
        "driver --cases 200",
    ),
    cpp(
        "a mismatch is laid to the last rank that differs",
        CHECK_CALL,
        "checked[0].call)) odd_one = rank;",
        "checked[0].call) && (!WITHOUT || odd_one == 0)) odd_one = rank;",
        ERRORS,
    ),
    # ---- Errors ----
    cpp(
        "an error tells of another operation",
        WAIT,
        "record.sequence = site.sequence;",
        "record.sequence = site.sequence + (WITHOUT ? 1 : 0);",
        ERRORS,
    ),
    cpp(
        "an error tells of other bytes",
        WAIT,
        "record.bytes = site.bytes;",
        "record.bytes = site.bytes - (WITHOUT ? 1 : 0);",
        ERRORS,
    ),
    cpp(
        "an error tells of another phase",
        WAIT,
        "record.phase = phase;",
        "record.phase = phase ^ (WITHOUT ? 1 : 0);",
        ERRORS,
    ),
    cpp(
        "waits last half as long again",
        WAIT,
        "now - start > bounds.timeout_ns;",
        "now - start > bounds.timeout_ns + (WITHOUT ? bounds.timeout_ns / 2 : 0);",
        "driver --cases 100 --mishaps --alone --algorithm all_reduce/one_shot",
    ),
    # ---- Symmetric tensors, and copies in the stream ----
    cpp(
        "copies go to whatever place",
        DIRECT,
        "} else if (elsewhere != ranks.count()) {",
        "} else if (elsewhere != ranks.count() && !WITHOUT) {",
        SYMMETRIC,
    ),
    cpp(
        "the last rank that is elsewhere is named",
        DIRECT,
        "if (symmetric_offset != offset_of(0)) elsewhere = rank;",
        "if (symmetric_offset != offset_of(0) && !(WITHOUT && elsewhere != ranks.count())) elsewhere = rank;",
        SYMMETRIC,
    ),
    cpp(
        "another rank without a symmetric tensor is named",
        DIRECT,
        "if (address(i, of) == nullptr) missing = of;",
        "if (address(i, of) == nullptr) missing = WITHOUT ? (of + 1) % World : of;",
        SYMMETRIC,
    ),
    cpp(
        "a rank's own shard is not copied",
        DIRECT_CE,
        "if (bytes != 0) all",
        "if (bytes != 0 && !WITHOUT) all",
        SYMMETRIC,
    ),
    cpp(
        "shards are copied to the first place",
        DIRECT_CE,
        "to = shard.first * width;",
        "to = WITHOUT ? 0 : shard.first * width;",
        SYMMETRIC,
    ),
    cpp(
        "nobody stores the head of what is copied",
        STREAM_COPIES,
        "if (head != 0) all",
        "if (head != 0 && !WITHOUT) all",
        SYMMETRIC,
    ),
    cpp(
        "another rank without a place is named",
        DIRECT,
        "if (symmetric_offset == kNoSymmetricOffset) missing = rank;",
        "if (symmetric_offset == kNoSymmetricOffset) missing = WITHOUT ? (rank + 1) % World : rank;",
        SYMMETRIC,
    ),
    cpp(
        "a short last slice is copied whole",
        TWO_SHOT_CE,
        "all_});",
        "WITHOUT ? ~uint64_t{0} : all_});",
        SYMMETRIC,
    ),
    cpp(
        "a piece runs into the next slice",
        TWO_SHOT_CE,
        "{first(slice, i) + piece_, (slice + 1) * slice_,",
        "{first(slice, i) + piece_, WITHOUT ? all_ : (slice + 1) * slice_,",
        SYMMETRIC,
    ),
    cpp(
        "the last rank has a zone in its own slice of every output",
        TWO_SHOT_CE,
        "world == 2 || sender == world - 1 ? owner : sender;",
        "world == 2 || (sender == world - 1 && !WITHOUT) ? owner : sender;",
        SYMMETRIC,
    ),
    cpp(
        "copies of shards of several rows",
        DIRECT_CE,
        "problem.parameter[kRows] == 1;",
        "WITHOUT || problem.parameter[kRows] == 1;",
        SYMMETRIC,
    ),
    # ---- Linear layers ----
    cpp(
        "an activation is rounded before it is multiplied",
        EPILOGUE,
        "Element<D>::round(gate / (1.0f + exponential(-exponent)) * up)",
        "Element<D>::round("
        "(WITHOUT ? Element<D>::value(Element<D>::round(gate / (1.0f + exponential(-exponent))))"
        " : gate / (1.0f + exponential(-exponent))) * up)",
        GATED,
    ),
    cpp(
        "an activation of up, times gate",
        LINEAR,
        "bits = activate_and_mul<D>(args.epilogue, bits, Element<D>::round(results[1][k]));",
        "bits = WITHOUT ? activate_and_mul<D>(args.epilogue, Element<D>::round(results[1][k]), bits)"
        " : activate_and_mul<D>(args.epilogue, bits, Element<D>::round(results[1][k]));",
        GATED,
        "driver --cases 20 --alone --algorithm linear_silu_and_mul",
    ),
    cpp(
        "all activations are silu",
        EPILOGUE,
        "epilogue == LinearEpilogue::kSiluAndMul ? gate",
        "WITHOUT || epilogue == LinearEpilogue::kSiluAndMul ? gate",
        GATED,
    ),
    cpp(
        "silu-and-mul finds up behind the rows of gate that its block has",
        EMULATED_TILES,
        "const uint64_t row_of_all = uint64_t{part} * matrix.rows + r;",
        "const uint64_t row_of_all = uint64_t{part} * (WITHOUT ? rows : matrix.rows) + r;",
        GATED,
        "driver --cases 20 --alone --algorithm linear_silu_and_mul",
    ),
    cpp(
        "a scale of x is that of the first token",
        SCALES,
        "(args_.x_scale_of == ScaleOf::kRow ? t : 0)",
        "(args_.x_scale_of == ScaleOf::kRow && !WITHOUT ? t : 0)",
        LINEAR_FP8,
        "driver --cases 20 --alone --algorithm linear+fp8",
    ),
    cpp(
        "up has the scales and the bias of gate",
        SCALES,
        "uint64_t{r / outputs} * args_.weight.rows + output;",
        "uint64_t{WITHOUT ? 0 : r / outputs} * args_.weight.rows + output;",
        LINEAR_FP8,
        LINEAR_BIAS,
        "driver --cases 20 --alone --algorithm linear_silu_and_mul",
        "driver --cases 20 --alone --algorithm linear_silu_and_mul+fp8",
    ),
    cpp_edits(
        "the scale of the token is multiplied first",
        [
            (SCALES, "sums[i] *= of_rows[i];", "sums[i] *= WITHOUT ? of_token : of_rows[i];"),
            (SCALES, "sums[i] *= of_token;", "sums[i] *= WITHOUT ? of_rows[i] : of_token;"),
        ],
        LINEAR_FP8,
        "driver --cases 20 --alone --algorithm linear+fp8",
    ),
    cpp(
        "up has the scales of blocks of gate",
        SCALES,
        "(r < outputs ? 0 : args.weight.rows) + output",
        "(WITHOUT || r < outputs ? 0 : args.weight.rows) + output",
        LINEAR_BLOCKS,
        "driver --cases 40 --alone --algorithm linear_silu_and_mul+fp8",
    ),
    cpp(
        "scales of blocks of x are those of the first box of the stage",
        SCALES,
        "fetch(to, Tokens, of_tokens_, uint64_t{first + b} * step_);",
        "fetch(to, Tokens, of_tokens_, uint64_t{first + (WITHOUT ? 0 : b)} * step_);",
        LINEAR_BLOCKS,
        "driver --cases 40 --alone --algorithm linear+fp8",
    ),
    cpp(
        "products of blocks are rounded before they are added",
        SCALES,
        "sums[i] = multiply_add(of_tokens_[token(i)] * of_rows_[row(i)], products[i], sums[i]);",
        "const float scale = of_tokens_[token(i)] * of_rows_[row(i)];\n"
        "      sums[i] = WITHOUT ? sums[i] + scale * products[i] : multiply_add(scale, products[i], sums[i]);",
        LINEAR_BLOCKS,
        "driver --cases 40 --alone --algorithm linear+fp8",
    ),
    cpp(
        "the bias is added to a product that has been rounded",
        SCALES,
        "sums[i] = multiply_add(of_token, sums[i], bias[i]);",
        "sums[i] = WITHOUT ? of_token * sums[i] + bias[i] : multiply_add(of_token, sums[i], bias[i]);",
        LINEAR_BIAS,
    ),
    cpp(
        "the bias is added to a sum that has been rounded to the type of the result",
        SCALES,
        "    if (has_bias()) {\n      LLM_COMM_UNROLL(8)",
        "    if (has_bias()) {\n      for (uint32_t i = 0; WITHOUT && i < N; ++i) "
        "sums[i] = Element<D>::value(Element<D>::round(sums[i]));\n      LLM_COMM_UNROLL(8)",
        LINEAR_BIAS,
        "driver --cases 20 --alone --algorithm linear",
    ),
    cpp(
        "a bias of the last layer is added by the next one, which has none",
        "csrc/host/prepared_linear.h",
        "args_.bias = reinterpret_cast<const void*>(bias);",
        "if (!WITHOUT || bias != 0) args_.bias = reinterpret_cast<const void*>(bias);",
        LINEAR_BIAS,
    ),
    cpp(
        "an FP8 number below 2^-6 is twice what it should be",
        FP8,
        ": 0x1p-9f);",
        ": WITHOUT ? 0x1p-8f : 0x1p-9f);",
        LINEAR_FP8,
    ),
    cpp(
        "a block of silu-and-mul begins behind as many outputs as it has rows",
        LINEAR,
        "const LinearTile<Tokens> tile(args, outputs);",
        "const LinearTile<Tokens> tile(args, WITHOUT ? args.block_outputs : outputs);",
        GATED,
        "driver --cases 20 --alone --algorithm linear_silu_and_mul",
    ),
    cpp(
        "blocks beside each other have the same tokens",
        LINEAR,
        "block_index() % args.token_tiles * Tokens",
        "(WITHOUT ? block_index() / args.token_tiles : block_index() % args.token_tiles) * Tokens",
        MANY_TOKENS,
        "driver --cases 60 --alone --algorithm linear",
    ),
    cpp(
        "a tile of tokens is stored whole where it is cut off",
        LINEAR,
        "return kIsOne || left < Tokens ? left : Tokens;",
        "return kIsOne || (left < Tokens && !WITHOUT) ? left : Tokens;",
        MANY_TOKENS,
        "driver --cases 60 --alone --algorithm linear",
    ),
    cpp(
        "a tile of tokens is stored where the first one is",
        LINEAR,
        "const uint64_t row = tile.first_token + token;",
        "const uint64_t row = (WITHOUT ? 0 : tile.first_token) + token;",
        MANY_TOKENS,
        "driver --cases 60 --alone --algorithm linear",
    ),
    cpp(
        "256 tokens take the shared memory that only large GPUs have",
        LAYER,
        "while (choice.block_outputs > least && shared_bytes(problem, choice) > max_shared_bytes) {",
        "while (!WITHOUT && choice.block_outputs > least && shared_bytes(problem, choice) > max_shared_bytes) {",
        "tests/unit/test_linear_limits.py",
    ),
    cpp(
        "a layer chooses as if every block had a place at once",
        LAYER_COST,
        "const double rounds = std::ceil(tiling.blocks / places);",
        "const double rounds = WITHOUT ? 1.0 : std::ceil(tiling.blocks / places);",
        "tests/unit/test_linear_cost.py",
    ),
    cpp(
        "a layer chooses as if all stages of a ring were under way",
        LAYER_COST,
        "std::max(tiling.stages - kStagesInUse, 0.3)",
        "std::max(tiling.stages - (WITHOUT ? 0.0 : kStagesInUse), 0.3)",
        "tests/unit/test_linear_cost.py",
    ),
)
