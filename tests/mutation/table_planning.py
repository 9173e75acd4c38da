"""Mutants of tables and of the choice of a plan, and of what engines are told."""

from __future__ import annotations

from mutant import Mutant, cpp, python

SELECTION = "llm_comm/planning/selection.py"
TABLES = "llm_comm/planning/tables.py"
READER = "csrc/host/yaml.cpp"
FILES = "csrc/host/tables.cpp"
TABLE_CHOICE = "csrc/host/table_choice.cpp"
PLAN = "llm_comm/planning/plan.py"
REGISTRY = "llm_comm/registry.py"
ALGORITHM = "csrc/algorithms/algorithm.h"
CONFIG = "llm_comm/config.py"
VERDICTS = "llm_comm/cli/engine_verdicts.py"
DESCRIPTIONS = "llm_comm/integrations/descriptions.py"
JOINING = "llm_comm/integrations/joining.py"
MODELS = "llm_comm/planning/models.py"
GRAPHS = "llm_comm/integrations/vllm/compiled_graphs.py"
MODEL_VERDICTS = "llm_comm/cli/model_verdicts.py"

SHAPES = "tests/unit/test_selection.py"
OF_FUSED_SIZES = "tests/unit/test_fused_sizes.py"
FUSED_SHAPES = "tests/unit/test_fused_selection.py"
OF_TABLES = "tests/unit/test_tables.py"
OF_LAYERS = "tests/unit/test_layer_tables.py"
OF_HOSTILE = "tests/unit/test_hostile_files.py"
OF_VERDICTS = "tests/unit/test_engine_verdicts.py"
OF_CONFIG = "tests/unit/test_config.py"
OF_MODELS = "tests/unit/test_doctor_model.py"
OF_WIRE = "tests/unit/test_wire_selection.py"

PLANNING: tuple[Mutant, ...] = (
    python(
        "the largest message is declined", SELECTION, "if message_bytes > limit:", "if message_bytes >= limit:", SHAPES
    ),
    python(
        "the largest fused message is declined",
        SELECTION,
        "sizes.first <= message_bytes <= sizes.last",
        "sizes.first <= message_bytes < sizes.last",
        OF_FUSED_SIZES,
        FUSED_SHAPES,
    ),
    python(
        "the smallest of the large fused messages is declined",
        SELECTION,
        "sizes.first <= message_bytes <= sizes.last",
        "sizes.first < message_bytes <= sizes.last",
        OF_FUSED_SIZES,
    ),
    python(
        "fused messages have the limit of others",
        SELECTION,
        "sizes = Sizes(0, min(limit, table.max_fused_bytes))",
        "sizes = Sizes(0, limit)",
        OF_FUSED_SIZES,
        FUSED_SHAPES,
    ),
    python(
        "fused messages may be larger than others",
        SELECTION,
        "sizes = Sizes(0, min(limit, table.max_fused_bytes))",
        "sizes = Sizes(0, table.max_fused_bytes)",
        OF_FUSED_SIZES,
    ),
    python(
        "ranges of fused sizes that adjoin stay apart",
        SELECTION,
        "if table.large_fused_bytes <= sizes.last + 1:",
        "if table.large_fused_bytes <= sizes.last:",
        OF_FUSED_SIZES,
    ),
    python(
        "the limit of large fused messages is that of small ones too",
        SELECTION,
        "Sizes(0, max(limit, sizes.last))",
        "Sizes(0, limit)",
        OF_FUSED_SIZES,
    ),
    python(
        "a range of fused sizes is empty",
        SELECTION,
        "if table.large_fused_bytes <= limit else (sizes,)",
        "if limit >= 0 else (sizes,)",
        OF_FUSED_SIZES,
    ),
    python(
        "a fused message is exact where an all-reduce is quantized",
        SELECTION,
        "if quantizes else quantized_from - 1",
        "if quantizes else limit",
        OF_FUSED_SIZES,
    ),
    python(
        "the smallest quantized message is fused exactly",
        SELECTION,
        "if quantizes else quantized_from - 1",
        "if quantizes else quantized_from",
        OF_FUSED_SIZES,
    ),
    python(
        "no fused message is quantized",
        SELECTION,
        "message_limit(ALL_REDUCE, table, config) if quantizes",
        "message_limit(ALL_REDUCE, table, config) if False",
        OF_FUSED_SIZES,
    ),
    python(
        "quantized fused messages have the limit of exact ones",
        SELECTION,
        "limit = message_limit(ALL_REDUCE, table, config) if quantizes",
        "limit = limit if quantizes",
        OF_FUSED_SIZES,
    ),
    python(
        "where norms do not depend on the batch, some are not fused",
        SELECTION,
        "return (Sizes(0, limit),)",
        "pass",
        OF_FUSED_SIZES,
        FUSED_SHAPES,
    ),
    python(
        "the smallest large batch is compiled with those that are not fused",
        GRAPHS,
        "{tokens.first - 1, tokens.last}",
        "{tokens.first, tokens.last}",
        OF_FUSED_SIZES,
    ),
    python(
        "a batch is fused that is a little too small",
        GRAPHS,
        "Sizes(-(-sizes.first // token_bytes), ",
        "Sizes(sizes.first // token_bytes, ",
        OF_FUSED_SIZES,
    ),
    python(
        "a graph is fused whose smallest batch is not",
        GRAPHS,
        "one.first <= first and last <= one.last",
        "last <= one.last",
        OF_FUSED_SIZES,
    ),
    python(
        "graphs of other fused sizes have the same key",
        GRAPHS,
        "{[tuple(sizes) for sizes in fused_sizes]}",
        "{fused_sizes[0]}",
        OF_FUSED_SIZES,
    ),
    python(
        "an option does not lower a table's limit",
        SELECTION,
        "table.max_message_bytes if config.max_message_bytes is None else config.max_message_bytes",
        "table.max_message_bytes",
        SHAPES,
    ),
    python(
        "an algorithm without kernels for a type is forced",
        SELECTION,
        "if problem.data_type in a.data_types and not a.is_symmetric]",
        "if not a.is_symmetric]",
        SHAPES,
    ),
    python(
        "the smallest quantized message is exact",
        SELECTION,
        "problem.whole_bytes() >= config.wire_min_bytes",
        "problem.whole_bytes() > config.wire_min_bytes",
        OF_WIRE,
    ),
    python(
        "symmetric tensors have another sum than quantized ones",
        SELECTION,
        "    if wire_of(problem, config):\n        return layout\n",
        "",
        OF_WIRE,
    ),
    python(
        "a quantized message uses rows of exact ones",
        SELECTION,
        "table.rows.get(of_wire(problem.operation, wire), ())",
        "table.rows.get(problem.operation, ())",
        OF_WIRE,
    ),
    python(
        "rows of quantized messages are those of exact ones",
        TABLES,
        "key = of_wire(row.operation, algorithm.wire)",
        "key = row.operation",
        OF_WIRE,
    ),
    python(
        "kernels of quantized messages are not loaded",
        SELECTION,
        "or algorithm.name == config.algorithm or bool(algorithm.wire)",
        "or algorithm.name == config.algorithm",
        SHAPES,
    ),
    cpp(
        "rows of quantized messages are sorted among exact ones",
        FILES,
        "if (*info.wire != 0) of +=",
        "if (!WITHOUT && *info.wire != 0) of +=",
        OF_WIRE,
    ),
    python("a forced algorithm is not", SELECTION, "if found not in forced:", "if found is None:", SHAPES),
    python(
        "numbers of another protocol serve",
        SELECTION,
        "(algorithm.protocol, algorithm.ranges.keys()) != (row.protocol, meant_for.ranges.keys())",
        "algorithm.ranges.keys() != meant_for.ranges.keys()",
        SHAPES,
    ),
    python(
        "numbers of other tunables serve",
        SELECTION,
        "(algorithm.protocol, algorithm.ranges.keys()) != (row.protocol, meant_for.ranges.keys())",
        "algorithm.protocol != row.protocol",
        SHAPES,
    ),
    python(
        "numbers that an algorithm does not take serve",
        SELECTION,
        "return all(bounds.takes(getattr(row, name))",
        "return True or all(bounds.takes(getattr(row, name))",
        SHAPES,
    ),
    python(
        "a row serves without candidates as it is",
        SELECTION,
        "min(max(getattr(row, name), bounds.least), bounds.most)",
        "getattr(row, name)",
        SHAPES,
    ),
    python(
        "a row serves without candidates beyond what is most",
        SELECTION,
        "min(max(getattr(row, name), bounds.least), bounds.most)",
        "max(getattr(row, name), bounds.least)",
        SHAPES,
    ),
    cpp(
        "copies in the stream need no row",
        ALGORITHM,
        'by == "CE"',
        "false",
        "tests/unit/test_symmetric_selection.py",
    ),
    python(
        "any number of fused blocks",
        SELECTION,
        "crowded_above=min(table.fused_blocks, _LARGEST_NUMBER)",
        "crowded_above=0",
        FUSED_SHAPES,
    ),
    python(
        "a plan loses its depth",
        SELECTION,
        "depth=shape.tiling.depth,",
        "depth=0,",
        "tests/unit/test_selection.py",
        "tests/emulated/test_use_table.py",
    ),
    python(
        "a plan's elements are rows",
        SELECTION,
        "chunk_elements=shape.tiling.launch_units * max(1, problem.row)",
        "chunk_elements=shape.tiling.launch_units",
        FUSED_SHAPES,
    ),
    python(
        "a message of exactly a row's size takes the next row",
        TABLES,
        "if message_bytes <= row.up_to",
        "if message_bytes < row.up_to",
        SHAPES,
    ),
    python(
        "a digest leaves out limits",
        TABLES,
        "content = repr((sorted(rows.items()), *self._replace(layers=layers, nodes=nodes, origin=Origin())[2:]))",
        "content = repr(sorted(rows.items()))",
        OF_TABLES,
    ),
    python(
        "tables that choose alike differ by what was measured",
        TABLES,
        "tuple(row.without_figures() for row in rows)",
        "tuple(rows)",
        OF_TABLES,
    ),
    python(
        "a table forgets the rows of other operations",
        TABLES,
        "rows={**self.rows, **by_operation(rows)}",
        "rows=by_operation(rows)",
        OF_TABLES,
        "tests/unit/test_cli_tune.py",
    ),
    cpp("rows of one size are allowed", FILES, "found->second.may_repeat", "true", OF_TABLES, OF_LAYERS),
    cpp("misspelt keys are passed over", FILES, "is_among(key, all)", "true", OF_TABLES),
    python(
        "a table file loses its large fused messages",
        "llm_comm/planning/catalogue.py",
        "{} if table.large_fused_bytes is None else",
        "{} if True else",
        OF_TABLES,
    ),
    python(
        "limits of a file are passed over",
        "llm_comm/planning/catalogue.py",
        "for limit in _LIMITS if limit in content",
        "for limit in () if limit in content",
        OF_TABLES,
    ),
    cpp("a number in quotes is one", READER, "is_quoted || is_octal", "is_octal", OF_TABLES),
    cpp("a tunable may be less", FILES, "*found < least", "false", OF_TABLES),
    cpp("the largest value of a tunable is refused", FILES, "*found > most", "*found >= most", OF_TABLES),
    cpp("a full table is refused", READER, "text.size() > kMaxFileBytes", "text.size() >= kMaxFileBytes", OF_HOSTILE),
    cpp("a file has a level more", READER, "level == kMaxLevels", "level > kMaxLevels", OF_HOSTILE),
    cpp("the last of two equal keys counts", READER, "mapping.find(key.word)", "nullptr", OF_HOSTILE),
    python(
        "rows of the largest length are declined",
        REGISTRY,
        "return 0 < elements <= self.max_row",
        "return 0 < elements < self.max_row",
        FUSED_SHAPES,
        "tests/emulated/test_use_table.py",
    ),
    cpp(
        "a table of another world is used",
        TABLE_CHOICE,
        "one.device == device && one.world == world",
        "one.device == device",
        OF_TABLES,
    ),
    cpp(
        "devices are near whatever their multiprocessors",
        TABLE_CHOICE,
        "here->sm_count == sm_count",
        "true",
        "tests/unit/test_installed_tables.py -k near",
    ),
    cpp(
        "a table for another world is used unsaid",
        TABLE_CHOICE,
        "!is_for_this",
        "found.table.device != device",
        OF_TABLES,
    ),
    cpp(
        "one-shot up to the same size in every world",
        TABLE_CHOICE,
        "400 * kKiB / std::max(1u, world - 1)",
        "400 * kKiB",
        OF_TABLES,
    ),
    python(
        "fused rows derived for small messages alone",
        SELECTION,
        "if up_to <= MIB else _FUSED_TWO_SHOT_OF_MANY",
        "if True else _FUSED_TWO_SHOT_OF_MANY",
        FUSED_SHAPES,
    ),
    python(
        "rows are counted as elements",
        PLAN,
        "self.chunk_elements // self.row if self.row else 0",
        "self.chunk_elements if self.row else 0",
        FUSED_SHAPES,
    ),
    # ---- Options ----
    python(
        "the environment outdoes Python",
        CONFIG,
        "{**values, **found, **given}",
        "{**values, **given, **found}",
        OF_CONFIG,
    ),
    python("unknown variables are passed over", CONFIG, "_check_variables(environ, on_unknown)", "pass", OF_CONFIG),
    python(
        "an unknown variable stops an engine",
        "llm_comm/integrations/engine_config.py",
        "load_with_unknown(lambda what, _: _warn(what, log), **options)",
        "Config(**options)",
        "tests/unit/test_option_table.py",
    ),
    python(
        "a variable of a machine that forbids multicast is passed over",
        CONFIG,
        "return False, by",
        "pass",
        "tests/unit/test_multicast_state.py",
    ),
    # ---- What engines are told ----
    python(
        "the oldest version is not supported", VERDICTS, "return oldest <= found", "return oldest < found", OF_VERDICTS
    ),
    python(
        "patches of the newest version are not supported",
        VERDICTS,
        "found[: len(newest)] <= newest",
        "found <= newest",
        OF_VERDICTS,
    ),
    python(
        "versions are compared as far as the shorter goes",
        VERDICTS,
        "return oldest <= found and",
        "return oldest[:1] <= found and",
        OF_VERDICTS,
    ),
    python(
        "an empty list of plugins allows all of them in vLLM too",
        VERDICTS,
        "(not allowed and engine.empty_allows_all)",
        "not allowed",
        OF_VERDICTS,
    ),
    python(
        "an engine that is switched off is said to be active",
        VERDICTS,
        "if joining.switched_off():",
        "if False:",
        OF_VERDICTS,
    ),
    python(
        "the log names an algorithm for sizes that are not served",
        DESCRIPTIONS,
        "if row.up_to >= exact:\n            break",
        "if False:\n            break",
        "tests/unit/test_integration_words.py",
    ),
    python(
        "the log gives KiB for MiB",
        DESCRIPTIONS,
        '("MiB", MIB), ("KiB", 1 << 10)',
        '("KiB", MIB), ("KiB", 1 << 10)',
        "tests/unit/test_integration_words.py",
    ),
    python(
        "the log tells of the table, not of the option",
        DESCRIPTIONS,
        "algorithm = config.algorithm if forced else row.algorithm",
        "algorithm = row.algorithm",
        "tests/unit/test_integration_words.py",
    ),
    python(
        "what one rank says is said of all",
        JOINING,
        "if len(texts) == names.size and",
        "if",
        "tests/unit/test_integration_words.py",
    ),
    python(
        "MLPs that are not known have silu-and-mul in SGLang",
        MODELS,
        "return self.kind in _ACTIVATED_IN_SGLANG and not self.is_fp8",
        "return not self.is_fp8",
        OF_MODELS,
    ),
    python(
        "layers of FP8 have silu-and-mul in SGLang",
        MODELS,
        "return self.kind in _ACTIVATED_IN_SGLANG and not self.is_fp8",
        "return self.kind in _ACTIVATED_IN_SGLANG",
        OF_MODELS,
    ),
    python(
        "the activation of both engines is said to be vLLM's",
        MODEL_VERDICTS,
        '" in vLLM" * (not is_activated_in_sglang)',
        '" in vLLM"',
        OF_MODELS,
    ),
)
