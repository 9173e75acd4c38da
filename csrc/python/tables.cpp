#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "host/planner.h"
#include "host/table_choice.h"
#include "host/yaml.h"
#include "python/registry.h"

namespace py = pybind11;
using namespace llm_comm::host;  // NOLINT: a binding file

namespace llm_comm::python {

namespace {

// Decodes a file name, or a text with one: the bytes need not be UTF-8.
py::str decoded(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

// Python value of a validated YAML node.
py::object meaning_of(const Node& node) {
  if (node.kind == Node::Kind::kMapping) {
    py::dict found;
    for (const auto& [key, value] : node.entries) found[py::str(key)] = meaning_of(value);
    return found;
  }
  if (node.kind == Node::Kind::kList) {
    py::list found;
    for (const Node& item : node.items) found.append(meaning_of(item));
    return found;
  }
  if (node.is_null()) return py::none();
  if (const auto whole = node.whole_number()) return py::int_(*whole);
  if (const auto number = node.number()) return py::float_(*number);
  const bool is_true = node.word == "true" || node.word == "True";
  if (!node.is_quoted && (is_true || node.word == "false" || node.word == "False")) return py::bool_(is_true);
  return py::str(node.word);
}

// In the order of the fields of planning.tables.Row.
py::list fields_of(const std::vector<Row>& rows) {
  py::list found;
  for (const Row& row : rows) {
    const AlgorithmInfo& info = *algorithms()[row.algorithm].info;
    const bool is_program = !row.program.empty();
    const TuningParameters& tuning = row.tuning;
    found.append(py::make_tuple(row.up_to, row.operation, is_program ? row.program.c_str() : info.name,
                                is_program ? "DSL" : info.protocol, tuning.blocks, tuning.threads, tuning.tile_lines,
                                tuning.cluster, tuning.depth, meaning_of(row.us), meaning_of(row.runner_up)));
  }
  return found;
}

// In the order of the parameters of planning.catalogue._table_of.
py::tuple fields_of(const Table& table) {
  return py::make_tuple(decoded(table.name), table.device, table.world, table.max_message_bytes, fields_of(table.rows),
                        meaning_of(table.content));
}

}  // namespace

void add_tables(py::module_& module) {
  module.def("read_table", [](const std::string& path) { return fields_of(read_table(path)); });
  module.def("shipped_tables", [] {
    py::list found;
    for (const Table& table : shipped_tables()) found.append(fields_of(table));
    return found;
  });
  module.def("find_table", [](const std::string& named, const std::string& device, uint32_t world, uint32_t sm_count,
                              uint32_t compute_capability) {
    const FoundTable found = find_table(named, device, world, sm_count, compute_capability);
    py::list remarks;
    for (const std::string& remark : found.remarks) remarks.append(decoded(remark));
    return py::make_tuple(fields_of(found.table),
                          py::make_tuple(found.origin, decoded(found.path), found.is_tuned, decoded(found.passed_over)),
                          remarks);
  });
  module.attr("table_suffix") = kTableSuffix;
  module.def("table_directory", [] {
    const auto found = table_directory();
    return found ? py::object(decoded(*found)) : py::none();
  });
  module.def("table_file_name", &table_file_name);
  module.def("rows_of_shards",
             [](const std::string& operation, uint32_t sms) { return fields_of(rows_of_shards(operation, sms)); });
}

}  // namespace llm_comm::python
