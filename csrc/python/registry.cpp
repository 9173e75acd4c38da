#include "python/registry.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/planner.h"
#include "python/data_type_at.h"

namespace py = pybind11;
using namespace llm_comm::host;  // NOLINT: a binding file

namespace llm_comm::python {

namespace {

// Names of the entries that exist and for which `wanted` is true.
template <class Info, size_t N, class Wanted>
py::list names(const Info (&infos)[N], Wanted wanted) {
  py::list found;
  for (const Info& info : infos) {
    if (info.name != nullptr && wanted(info)) found.append(info.name);
  }
  return found;
}
constexpr auto kAny = [](const auto&) { return true; };

py::object namespace_of(const py::dict& fields) {
  return py::module_::import("types").attr("SimpleNamespace")(**fields);
}

py::object describe(uint32_t number, const Algorithm& algorithm) {
  py::list types;
  for (const DataType type : algorithm.types) types.append(data_type_name(type));
  py::dict ranges;
  for (const Tunable& tunable : algorithm.tunables->tunable) {
    if (tunable.name != nullptr)
      ranges[tunable.name] = py::make_tuple(tunable.min, tunable.max, tunable.is_power_of_two);
  }
  return namespace_of(py::dict(
      py::arg("number") = number, py::arg("operation") = algorithm.operation->name,
      py::arg("name") = algorithm.info->name, py::arg("protocol") = algorithm.info->protocol,
      py::arg("title") = algorithm.info->title, py::arg("data_types") = types,
      py::arg("symmetric") = algorithm.info->symmetric, py::arg("uses_multimem") = algorithm.info->uses_multimem,
      py::arg("sums_in_switch") = algorithm.info->sums_in_switch,
      py::arg("ranks_may_differ") = algorithm.info->ranks_may_differ, py::arg("wire") = algorithm.info->wire,
      py::arg("needs_row") = algorithm.info->needs_row(),
      py::arg("tunables") = names(algorithm.tunables->tunable, kAny), py::arg("ranges") = ranges));
}

py::object describe(const OperationInfo& operation) {
  return namespace_of(py::dict(
      py::arg("name") = operation.name, py::arg("title") = operation.title,
      py::arg("buffers") = names(operation.buffers, kAny),
      py::arg("outputs") = names(operation.buffers, [](const BufferInfo& buffer) { return buffer.is_output; }),
      py::arg("optional") = names(operation.buffers, [](const BufferInfo& buffer) { return buffer.is_optional; }),
      py::arg("parameters") = names(operation.parameters, kAny), py::arg("row_multiple") = operation.row_multiple,
      py::arg("max_row") = operation.max_row));
}

Problem problem_of(uint64_t count, uint32_t row, uint32_t data_type, uint32_t world_size,
                   const std::vector<double>& parameters) {
  const DataType type = data_type_at(data_type);
  if (parameters.size() > kMaxParameters) throw std::invalid_argument("too many parameters");
  Problem problem{count, row, type, world_size, {}};
  std::copy(parameters.begin(), parameters.end(), problem.parameter);
  return problem;
}

}  // namespace

const Algorithm& algorithm_at(uint32_t number) {
  if (number >= algorithms().size()) {
    throw std::invalid_argument("there is no algorithm number " + std::to_string(number));
  }
  return algorithms()[number];
}

void add_registry(py::module_& module) {
  py::class_<Problem>(module, "Problem")
      .def(py::init(&problem_of), py::kw_only(), py::arg("count"), py::arg("row"), py::arg("data_type"),
           py::arg("world_size"), py::arg("parameters"));

  py::class_<TuningParameters>(module, "TuningParameters")
      .def(py::init([](uint32_t blocks, uint32_t threads, uint32_t tile_lines, uint32_t cluster, uint32_t depth,
                       uint32_t crowded_above) {
             return TuningParameters{blocks, threads, tile_lines, cluster, depth, crowded_above};
           }),
           py::kw_only(), py::arg("blocks"), py::arg("threads") = 0, py::arg("tile_lines") = 0, py::arg("cluster") = 0,
           py::arg("depth") = 0, py::arg("crowded_above") = 0)
      .def_readonly("blocks", &TuningParameters::blocks)
      .def_readonly("threads", &TuningParameters::threads)
      .def_readonly("tile_lines", &TuningParameters::tile_lines)
      .def_readonly("cluster", &TuningParameters::cluster)
      .def_readonly("depth", &TuningParameters::depth)
      .def_readonly("crowded_above", &TuningParameters::crowded_above);

  py::class_<Limits>(module, "Limits")
      .def(py::init([](uint64_t slot_bytes, uint32_t sm_count, uint32_t max_cluster, uint32_t compute_capability,
                       uint64_t staging_bytes) {
             return Limits{slot_bytes, sm_count, max_cluster, compute_capability, staging_bytes};
           }),
           py::kw_only(), py::arg("slot_bytes"), py::arg("sm_count"), py::arg("max_cluster"),
           py::arg("compute_capability"), py::arg("staging_bytes") = 0)
      .def_readonly("slot_bytes", &Limits::slot_bytes)
      .def_readonly("staging_bytes", &Limits::staging_bytes)
      .def_readonly("sm_count", &Limits::sm_count)
      .def_readonly("max_cluster", &Limits::max_cluster)
      .def_readonly("compute_capability", &Limits::compute_capability);

  py::class_<Tiling>(module, "Tiling")
      .def(py::init([](uint32_t blocks, uint32_t tile_lines, uint32_t cluster, uint32_t depth, uint64_t launch_units) {
             return Tiling{blocks, tile_lines, cluster, depth, launch_units};
           }),
           py::kw_only(), py::arg("blocks"), py::arg("tile_lines"), py::arg("cluster"), py::arg("depth"),
           py::arg("launch_units"))
      .def_readonly("blocks", &Tiling::blocks)
      .def_readonly("tile_lines", &Tiling::tile_lines)
      .def_readonly("cluster", &Tiling::cluster)
      .def_readonly("depth", &Tiling::depth)
      .def_readonly("launch_units", &Tiling::launch_units);

  py::class_<Grid>(module, "Grid")
      .def_readonly("blocks", &Grid::blocks)
      .def_readonly("threads", &Grid::threads)
      .def_readonly("shared_bytes", &Grid::shared_bytes)
      .def_readonly("cluster_blocks", &Grid::cluster_blocks)
      .def_readonly("variant", &Grid::variant);

  py::class_<Shape>(module, "Shape")
      .def_readonly("tiling", &Shape::tiling)
      .def_readonly("launches", &Shape::launches)
      .def_readonly("whole", &Shape::whole)
      .def_readonly("last", &Shape::last);

  // Element sizes by name, in the order of DataType.
  module.def("data_types", [] {
    py::dict types;
    for (uint32_t i = 0; i < kDataTypes; ++i) {
      const auto type = static_cast<DataType>(i);
      types[data_type_name(type)] = element_bytes(type);
    }
    return types;
  });
  module.def("algorithms", [] {
    py::list found;
    for (uint32_t number = 0; number < algorithms().size(); ++number)
      found.append(describe(number, algorithms()[number]));
    return found;
  });
  module.def("operations", [] {
    py::list found;
    std::set<const OperationInfo*> seen;
    for (const Algorithm& algorithm : algorithms()) {
      if (seen.insert(algorithm.operation).second) found.append(describe(*algorithm.operation));
    }
    return found;
  });
  module.def("shape", [](uint32_t algorithm, const Problem& problem, const TuningParameters& tuning,
                         const Limits& limits) { return algorithm_at(algorithm).shape(problem, tuning, limits); });
  module.def("candidates", [](uint32_t algorithm, const Problem& problem, const Limits& limits) {
    return algorithm_at(algorithm).candidates(problem, limits);
  });
}

}  // namespace llm_comm::python
