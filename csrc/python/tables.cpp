#include "python/tables.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/planner.h"
#include "host/table_choice.h"
#include "host/yaml.h"

namespace py = pybind11;
using namespace llm_comm::host;  // NOLINT: a binding file

namespace llm_comm::python {

namespace {

// The name of a file, or a text that has one: its bytes need not be UTF-8.
py::str decoded(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

// In the order of the fields of planning.tables.Row, and of planning.layers.LayerRow and planning.node_rows.NodeRow.
py::tuple fields_of(const Row& row) {
  const AlgorithmInfo& info = *algorithms()[row.algorithm].info;
  const bool is_program = !row.program.empty();
  const Choice& choice = row.choice;
  py::object runner_up = py::none();
  if (row.runner_up) {
    runner_up = py::make_tuple(row.runner_up->algorithm, row.runner_up->protocol, row.runner_up->us);
  }
  return py::make_tuple(row.up_to, row.operation, is_program ? row.program.c_str() : info.name,
                        is_program ? "DSL" : info.protocol, choice.blocks, choice.threads, choice.tile_lines,
                        choice.cluster, choice.depth, row.us, runner_up);
}
py::tuple fields_of(const LayerRow& row) {
  return py::make_tuple(row.operation, row.outputs, row.inputs, row.pdl, row.up_to, row.is_faster, row.block_outputs,
                        row.stages, row.stage_boxes, row.us, row.cublas_us);
}
py::tuple fields_of(const NodeRow& row) {
  return py::make_tuple(row.nodes, row.up_to, row.exchange, row.chunk_bytes, row.is_faster, row.us, row.nccl_us);
}

template <class R>
py::list fields_of(const std::vector<R>& rows) {
  py::list found;
  for (const R& row : rows) found.append(fields_of(row));
  return found;
}

// Keywords of planning.table_files.table_of.
py::dict fields_of(const Table& table) {
  py::dict measured;
  for (const auto& [about, value] : table.measured) measured[py::str(about)] = value;
  py::object multicast = py::none();
  if (const auto& on = table.multicast) multicast = py::make_tuple(on->device, on->driver, on->world, on->date);
  py::object min_symmetric = py::cast(table.min_symmetric_bytes);
  if (!table.min_symmetric_of.empty()) min_symmetric = py::cast(table.min_symmetric_of);
  return py::dict(py::arg("name") = decoded(table.name), py::arg("device") = table.device,
                  py::arg("world_size") = table.world, py::arg("max_message_bytes") = table.max_message_bytes,
                  py::arg("max_fused_bytes") = table.max_fused_bytes, py::arg("fused_blocks") = table.fused_blocks,
                  py::arg("min_symmetric_bytes") = min_symmetric, py::arg("multicast") = multicast,
                  py::arg("rows") = fields_of(table.rows), py::arg("layers") = fields_of(table.layers),
                  py::arg("nodes") = fields_of(table.nodes), py::arg("measured") = measured);
}

// The line of a value, what it is, and its content: of a word, and of a text that stood in quotes, itself.
py::tuple content_of(const Node& node) {
  if (node.kind == Node::Kind::kWord) return py::make_tuple(node.line, node.is_quoted ? "text" : "word", node.word);
  if (node.kind == Node::Kind::kList) {
    py::list items;
    for (const Node& item : node.items) items.append(content_of(item));
    return py::make_tuple(node.line, "list", items);
  }
  py::dict entries;
  for (const auto& [key, value] : node.entries) entries[py::str(key)] = content_of(value);
  return py::make_tuple(node.line, "mapping", entries);
}

}  // namespace

void add_tables(py::module_& module) {
  module.def("read_file", [](const std::string& path) { return py::bytes(read_file(path)); });
  module.def("parse_yaml", [](const std::string& text) { return content_of(read_yaml(text)); });
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
  module.def("rows_of_parts",
             [](const std::string& operation, uint32_t sms) { return fields_of(rows_of_parts(operation, sms)); });
}

}  // namespace llm_comm::python
