// Python module llm_comm._core: the Core class and free functions. Bindings only, no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "host/build_config.h"
#include "host/core.h"
#include "host/counted_call.h"
#include "host/multicast_switches.h"
#include "host/planner.h"
#include "host/writable_memory.h"
#include "python/bound_call.h"
#include "python/data_type_at.h"
#include "python/delete_without_gil.h"
#include "python/linear.h"
#include "python/node_exchange.h"
#include "python/registry.h"
#include "python/tensor_capsule.h"

namespace py = pybind11;
using namespace llm_comm;        // NOLINT: a binding file
using namespace llm_comm::host;  // NOLINT
using llm_comm::python::algorithm_at;
using llm_comm::python::as_function;
using llm_comm::python::data_type_at;
using llm_comm::python::LayerScales;
using llm_comm::python::linear_problem;
using llm_comm::python::ScaleStrides;
using ExpertScaleStrides = llm_comm::experts::ScaleStrides;

namespace {

using CoreHolder = std::unique_ptr<Core, llm_comm::python::DeleteWithoutGil<Core>>;

// Arguments of Core::prepare().
using Launches = std::tuple<uint32_t, Problem, Tiling>;

Sharing sharing_of(const std::string& name) {
  if (name == "descriptor") return Sharing::kDescriptor;
  if (name == "fabric") return Sharing::kFabric;
  if (name == "cudaIpc") return Sharing::kIpc;
  throw std::invalid_argument("memory is shared by descriptor, fabric or cudaIpc, not by " + name);
}

// Runs `make` without the GIL. Returns the handle as a tuple (fd, bytes): a descriptor that the caller owns and b"", or
// -1 and the bytes of a fabric or cudaIpc handle.
template <class Make>
py::tuple handle_of(Make make) {
  const WorkspaceHandle handle = [&] {
    const py::gil_scoped_release others_may_run;
    return make();
  }();
  return py::make_tuple(handle.fd, py::bytes(handle.bytes));
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.attr("version") = LLM_COMM_VERSION;
  module.attr("cuda_archs") = LLM_COMM_CUDA_ARCHS;
  module.attr("cuda_ptx_archs") = LLM_COMM_CUDA_PTX_ARCHS;
  module.attr("nvcc_version") = LLM_COMM_NVCC_VERSION;
  module.attr("bounded_waits") = LLM_COMM_BOUNDED_WAITS != 0;
  module.attr("max_world_size") = llm_comm::kMaxWorldSize;
  py::dict switches;  // variables that can forbid NVLink multicast, with the usual value for that
  for (const MulticastSwitch& one : kMulticastSwitches) switches[one.variable] = one.off;
  module.attr("multicast_switches") = switches;
  module.attr("max_windows") = llm_comm::kMaxWindows;

  py::class_<CoreOptions>(module, "CoreOptions")
      .def(py::init([](int rank, int world_size, uint64_t slot_bytes, double timeout_s, bool dependent_launch,
                       bool check_calls, uint64_t staging_bytes, bool multicast) {
             return CoreOptions{rank,        world_size,    slot_bytes, timeout_s, dependent_launch,
                                check_calls, staging_bytes, multicast};
           }),
           py::kw_only(), py::arg("rank"), py::arg("world_size"), py::arg("slot_bytes"), py::arg("timeout_s"),
           py::arg("dependent_launch"), py::arg("check_calls"), py::arg("staging_bytes") = 0,
           py::arg("multicast") = false);

  llm_comm::python::add_registry(module);
  llm_comm::python::add_tables(module);
  llm_comm::python::add_linear(module);

  using Pair = std::pair<uint32_t, uint64_t>;  // a Place
  py::class_<ProgramLaunch>(module, "ProgramLaunch")
      .def(
          py::init([](uint32_t kernel, uint32_t groups, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                      Pair memory, uint64_t memory_bytes, Pair semaphore_words, uint32_t semaphores, uint32_t data_type,
                      uint64_t input_bytes, uint64_t output_bytes, uint64_t part_bytes, uint32_t symmetric) {
            return ProgramLaunch{kernel,       groups,
                                 blocks,       threads,
                                 shared_bytes, {memory.first, memory.second},
                                 memory_bytes, {semaphore_words.first, semaphore_words.second},
                                 semaphores,   data_type_at(data_type),
                                 input_bytes,  output_bytes,
                                 part_bytes,   symmetric};
          }),
          py::kw_only(), py::arg("kernel"), py::arg("groups"), py::arg("blocks"), py::arg("threads"),
          py::arg("shared_bytes"), py::arg("memory"), py::arg("memory_bytes"), py::arg("semaphore_words"),
          py::arg("semaphores"), py::arg("data_type"), py::arg("input_bytes"), py::arg("output_bytes"),
          py::arg("part_bytes"), py::arg("symmetric"));

  py::class_<Call>(module, "Call")
      .def_readonly("operation", &Call::operation)
      .def_readonly("data_type", &Call::data_type)
      .def_readonly("row", &Call::row)
      .def_readonly("count", &Call::count)
      .def_readonly("number", &Call::number)
      .def_readonly("details", &Call::details);

  py::class_<WrongSizes>(module, "WrongSizes")
      .def_readonly("fault", &WrongSizes::fault)
      .def_readonly("rank", &WrongSizes::rank)
      .def_readonly("peer", &WrongSizes::peer)
      .def_readonly("rows", &WrongSizes::rows)
      .def_readonly("limit", &WrongSizes::limit);
  py::class_<OperationError>(module, "OperationError")
      .def_readonly("cause", &OperationError::cause)
      .def_readonly("rank", &OperationError::rank)
      .def_readonly("peer", &OperationError::peer)
      .def_readonly("operation", &OperationError::operation)
      .def_readonly("phase", &OperationError::phase)
      .def_readonly("sequence", &OperationError::sequence)
      .def_readonly("bytes", &OperationError::bytes)
      .def_readonly("calls", &OperationError::calls)
      .def_readonly("text", &OperationError::text)
      .def_readonly("sizes", &OperationError::sizes);

  py::class_<llm_comm::python::Loan>(module, "Loan").def("has_ended", &llm_comm::python::Loan::has_ended);

  py::class_<CallStatistics, std::shared_ptr<CallStatistics>>(module, "CallStatistics")
      .def(py::init<>())
      .def_property_readonly("calls", [](const CallStatistics& statistics) { return statistics.calls.load(); })
      .def_property_readonly("bytes", [](const CallStatistics& statistics) { return statistics.bytes.load(); })
      .def_property_readonly("captured_calls",
                             [](const CallStatistics& statistics) { return statistics.captured_calls.load(); })
      .def_property_readonly("captured_bytes",
                             [](const CallStatistics& statistics) { return statistics.captured_bytes.load(); });
  py::class_<Counter>(module, "Counter")
      .def(py::init<std::shared_ptr<CallStatistics>, uint64_t>(), py::arg("statistics").none(false), py::arg("bytes"))
      .def("add", [](const Counter& counter) { counter.add(Outcome::kEnqueued); });

  py::class_<Core, CoreHolder>(module, "Core")
      .def(
          "create_workspace",
          [](Core& core, const std::string& sharing) {
            return handle_of([&] { return core.create_workspace(sharing_of(sharing)); });
          },
          py::arg("sharing"))
      .def(
          "map_peer", [](Core& core, int peer, int fd, const std::string& bytes) { core.map_peer(peer, {fd, bytes}); },
          py::arg("peer"), py::arg("fd"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("workspace_bytes", &Core::workspace_bytes)
      .def("begin_release", &Core::begin_release, py::call_guard<py::gil_scoped_release>())
      .def("release_workspaces", &Core::release_workspaces, py::call_guard<py::gil_scoped_release>())
      .def("restore_workspace", [](Core& core) { return handle_of([&] { return core.restore_workspace(); }); })
      .def(
          "restore_peer",
          [](Core& core, int peer, int fd, const std::string& bytes) { core.restore_peer(peer, {fd, bytes}); },
          py::arg("peer"), py::arg("fd"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("end_release", &Core::end_release, py::call_guard<py::gil_scoped_release>())
      .def(
          "create_multicast", [](Core& core) { return core.create_multicast().fd; },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "join_multicast", [](Core& core, int fd) { core.join_multicast({fd, {}}); },
          py::call_guard<py::gil_scoped_release>())
      .def("add_multicast_device", &Core::add_multicast_device, py::call_guard<py::gil_scoped_release>())
      .def("bind_multicast", &Core::bind_multicast, py::call_guard<py::gil_scoped_release>())
      .def("drop_multicast", &Core::drop_multicast, py::call_guard<py::gil_scoped_release>())
      .def("max_cluster_blocks", &Core::max_cluster_blocks, py::call_guard<py::gil_scoped_release>())
      .def("send_marks", &Core::send_marks, py::call_guard<py::gil_scoped_release>())
      .def("peers_unseen", &Core::peers_unseen, py::call_guard<py::gil_scoped_release>())
      .def("load", &Core::load, py::arg("algorithms"), py::call_guard<py::gil_scoped_release>())
      // `direct`: alternative that runs if the tensors are in symmetric memory. Each alternative has its own counter.
      .def(
          "prepare",
          [](py::object core, uint32_t algorithm, const Problem& problem, const Tiling& tiling,
             const std::optional<Launches>& direct, const std::optional<Counter>& counter,
             const std::optional<Counter>& direct_counter) {
            const OperationInfo& operation = *algorithm_at(algorithm).operation;
            auto& of = core.cast<Core&>();
            CountedCall call{of.prepare(algorithm, problem, tiling), counter};
            if (direct) {
              auto in_its_place = std::apply([&](auto&... what) { return of.prepare(what...); }, *direct);
              call.direct = std::make_unique<CountedCall>(CountedCall{std::move(in_its_place), direct_counter});
            }
            return as_function(std::move(core), std::move(call), operation);
          },
          py::arg("algorithm"), py::arg("problem"), py::arg("tiling"), py::arg("direct") = py::none(),
          py::arg("counter") = py::none(), py::arg("direct_counter") = py::none())
      .def("multiplies_fp8", &Core::multiplies_fp8)
      .def(
          "linear_choices",
          [](const Core& core, uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type,
             const std::string& epilogue, const LayerScales& scales) {
            return core.linear_choices(linear_problem(tokens, inputs, outputs, data_type, epilogue, scales));
          },
          py::kw_only(), py::arg("tokens"), py::arg("inputs"), py::arg("outputs"), py::arg("data_type"),
          py::arg("epilogue"), py::arg("scales") = py::none())
      .def(
          "prepare_linear",
          [](py::object core, uint32_t tokens, uint32_t inputs, uint32_t outputs, uint32_t data_type,
             const std::string& epilogue, const LinearChoice& choice, const LayerScales& scales,
             const ScaleStrides& x_scale_strides, const std::optional<Counter>& counter) {
            const LinearProblem problem =
                linear_problem(tokens, inputs, outputs, data_type, epilogue, scales, x_scale_strides);
            CountedCall call{core.cast<Core&>().prepare_linear(problem, choice), counter};
            return as_function(std::move(core), std::move(call),
                               scales ? llm_comm::linear::kScaledInfo : llm_comm::linear::kInfo);
          },
          py::kw_only(), py::arg("tokens"), py::arg("inputs"), py::arg("outputs"), py::arg("data_type"),
          py::arg("epilogue"), py::arg("choice"), py::arg("scales") = py::none(),
          py::arg("x_scale_strides") = py::none(), py::arg("counter") = py::none())
      .def(
          "prepare_experts",
          [](py::object core, uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t hidden, uint32_t intermediate,
             uint32_t data_type, const std::string& epilogue, const LinearChoice& gate_up_choice,
             const LinearChoice& down_choice, float scaling_factor,
             const std::optional<std::array<ExpertScaleStrides, 2>>& scale_strides, uint32_t first_expert,
             uint32_t all_experts, const std::optional<Counter>& counter) {
            const LinearProblem gate_up = linear_problem(tokens, hidden, intermediate, data_type, epilogue, {});
            const OperandType weights = scale_strides ? OperandType::kFloat8 : gate_up.operands;
            const auto [gate_up_strides, down_strides] = scale_strides.value_or(std::array<ExpertScaleStrides, 2>{});
            CountedCall call{core.cast<Core&>().prepare_experts(
                                 {tokens, top_k, experts, hidden, intermediate, gate_up.type, weights, gate_up.epilogue,
                                  scaling_factor, gate_up_strides, down_strides, first_expert, all_experts},
                                 gate_up_choice, down_choice),
                             counter};
            return as_function(std::move(core), std::move(call), llm_comm::experts::kBuffers,
                               llm_comm::experts::kOptionalBuffers);
          },
          py::kw_only(), py::arg("tokens"), py::arg("top_k"), py::arg("experts"), py::arg("hidden"),
          py::arg("intermediate"), py::arg("data_type"), py::arg("epilogue"), py::arg("gate_up") = LinearChoice{},
          py::arg("down") = LinearChoice{}, py::arg("scaling_factor") = 1.0f, py::arg("scale_strides") = py::none(),
          py::arg("first_expert") = 0, py::arg("all_experts") = 0, py::arg("counter") = py::none())
      .def(
          "prepare_router",
          [](py::object core, uint32_t tokens, uint32_t experts, uint32_t top_k, uint32_t hidden, uint32_t data_type,
             bool renormalize, const std::optional<Counter>& counter) {
            const llm_comm::router::Problem problem{tokens,     experts, top_k, hidden, data_type_at(data_type),
                                                    renormalize};
            CountedCall call{core.cast<Core&>().prepare_router(problem), counter};
            return as_function(std::move(core), std::move(call), llm_comm::router::kBuffers, 1u << 2);
          },
          py::kw_only(), py::arg("tokens"), py::arg("experts"), py::arg("top_k"), py::arg("hidden"),
          py::arg("data_type"), py::arg("renormalize"), py::arg("counter") = py::none())
      .def(
          "prepare_rope",
          [](py::object core, const llm_comm::rope::Problem& problem, uint32_t block_rows, uint32_t stages,
             const std::optional<Counter>& counter) {
            CountedCall call{core.cast<Core&>().prepare_rope(problem, {block_rows, stages}), counter};
            return as_function(std::move(core), std::move(call), llm_comm::rope::kBuffers,
                               llm_comm::rope::kOptionalBuffers);
          },
          py::arg("problem"), py::kw_only(), py::arg("block_rows") = 0, py::arg("stages") = 0,
          py::arg("counter") = py::none())
      .def("load_program", &Core::load_program, py::arg("image"), py::arg("kernel"), py::arg("title"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "prepare_program",
          [](py::object core, const ProgramLaunch& launch, const std::optional<Counter>& counter) {
            CountedCall call{core.cast<Core&>().prepare_program(launch), counter};
            return as_function(std::move(core), std::move(call), 2, 0);
          },
          py::arg("launch"), py::arg("counter") = py::none())
      .def(
          "create_window",
          [](Core& core, uint32_t window, uint64_t bytes) {
            return handle_of([&] { return core.create_window(window, bytes); });
          },
          py::arg("window"), py::arg("bytes"))
      .def(
          "map_window",
          [](Core& core, uint32_t window, int peer, int fd, const std::string& bytes) {
            core.map_window(window, peer, {fd, bytes});
          },
          py::arg("window"), py::arg("peer"), py::arg("fd"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("unmap_window", &Core::unmap_window, py::call_guard<py::gil_scoped_release>())
      .def("close_window", &Core::close_window, py::call_guard<py::gil_scoped_release>())
      .def("find",
           [](const Core& core, uint64_t address, uint64_t bytes) -> std::optional<std::pair<uint32_t, uint64_t>> {
             const auto symmetric_offset = core.find(address, bytes);
             if (!symmetric_offset) return std::nullopt;
             return std::make_pair(symmetric_offset->window, symmetric_offset->offset);
           })
      .def(
          "lend",
          [](const Core& core, uint32_t window, uint64_t offset, uint64_t bytes, int device) {
            const std::shared_ptr<char> memory = core.memory_of_window(window);
            auto lent = llm_comm::python::lend_as_tensor({memory, memory.get() + offset}, bytes, device);
            return py::make_tuple(lent.capsule, lent.loan);
          },
          py::arg("window"), py::arg("offset"), py::arg("bytes"), py::arg("device"))
      .def(
          "channels",
          [](Core& core, std::pair<uint32_t, uint64_t> memory, uint64_t bytes, std::pair<uint32_t, uint64_t> words,
             uint32_t semaphores) {
            const std::string made = [&] {
              const py::gil_scoped_release others_may_run;
              return core.channels({memory.first, memory.second}, bytes, {words.first, words.second}, semaphores);
            }();
            return py::bytes(made);
          },
          py::arg("memory"), py::arg("bytes"), py::arg("semaphore_words"), py::arg("semaphores"))
      .def("error", &Core::error)
      .def("check_order", &Core::check_order, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Core::abort)
      .def("peer_exited", &Core::peer_exited)
      .def("has_been_captured", &Core::has_been_captured)
      .def("wait_for", &Core::wait_for, py::arg("stream"), py::call_guard<py::gil_scoped_release>())
      .def("last_call", &Core::last_call)
      .def("operations_ended", &Core::operations_ended, py::call_guard<py::gil_scoped_release>());

  module.def("slot_bytes",
             [](uint64_t workspace_bytes) { return llm_comm::WorkspaceLayout::within(workspace_bytes).slot_bytes(); });
  module.def("staging_bytes", [](uint64_t workspace_bytes) {
    return llm_comm::WorkspaceLayout::within(workspace_bytes).staging_bytes();
  });

  // "NAME=value" of the first variable of an environment that forbids NVLink multicast, or "".
  module.def("multicast_switched_off", [](const std::map<std::string, std::string>& environment) {
    return multicast_switched_off([&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  });
  module.def("bytes_of_semaphores", &bytes_of_semaphores, py::arg("world_size"), py::arg("semaphores"));
  module.def("bytes_of_channels", &bytes_of_channels);
  module.def("is_writable", &is_writable, py::arg("address"), py::arg("bytes"));
  llm_comm::python::add_node_exchange(module);

  module.def("make_emulated_core",
             [](const CoreOptions& options) { return CoreHolder(make_emulated_core(options).release()); });
  module.def("make_cuda_core", [](const CoreOptions& options, int device) {
    const py::gil_scoped_release others_may_run;  // loading the kernels takes a while
    return CoreHolder(make_cuda_core(options, device).release());
  });
  module.def("device_report", [](int device) {
    const DeviceReport report = cuda_device_report(device);
    py::dict result;
    result["name"] = report.name;
    result["compute_capability"] = report.compute_capability;
    result["sm_count"] = report.sm_count;
    result["vmm"] = report.vmm;
    result["posix_fd"] = report.posix_fd;
    result["multicast_supported"] = report.multicast_supported;
    result["driver_version"] = report.driver_version;
    return result;
  });
}
