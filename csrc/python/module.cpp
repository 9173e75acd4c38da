// llm_comm._core: the Core class and what the build contains. No logic here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/build_config.h"
#include "host/core.h"

namespace py = pybind11;
using namespace llm_comm::host;  // NOLINT: a binding file

PYBIND11_MODULE(_core, module) {
  module.attr("version") = LLM_COMM_VERSION;
  module.attr("cuda_archs") = LLM_COMM_CUDA_ARCHS;
  module.attr("cuda_ptx_archs") = LLM_COMM_CUDA_PTX_ARCHS;
  module.attr("nvcc_version") = LLM_COMM_NVCC_VERSION;

  py::class_<CoreOptions>(module, "CoreOptions")
      .def(py::init([](int rank, int world_size, uint64_t slot_bytes, double timeout_s, bool dependent_launch) {
             return CoreOptions{rank, world_size, slot_bytes, timeout_s, dependent_launch};
           }),
           py::kw_only(), py::arg("rank"), py::arg("world_size"), py::arg("slot_bytes"), py::arg("timeout_s"),
           py::arg("dependent_launch"));

  py::class_<LaunchPlan>(module, "LaunchPlan")
      .def(py::init(
               [](uint32_t algorithm, uint32_t blocks, uint32_t tile_lines_log2, uint32_t depth, uint64_t chunk_count) {
                 return LaunchPlan{algorithm, blocks, tile_lines_log2, depth, chunk_count};
               }),
           py::kw_only(), py::arg("algorithm"), py::arg("blocks"), py::arg("tile_lines_log2"), py::arg("depth"),
           py::arg("chunk_count"));

  py::class_<ExpiredWait>(module, "ExpiredWait")
      .def_readonly("rank", &ExpiredWait::rank)
      .def_readonly("peer", &ExpiredWait::peer)
      .def_readonly("operation", &ExpiredWait::operation)
      .def_readonly("phase", &ExpiredWait::phase)
      .def_readonly("sequence", &ExpiredWait::sequence)
      .def_readonly("bytes", &ExpiredWait::bytes);

  py::class_<PreparedCall>(module, "PreparedCall")
      .def("run", &PreparedCall::run, py::call_guard<py::gil_scoped_release>());

  // Handles are (fd, bytes): a descriptor that the caller now owns and b"", or -1 and the bytes of a cudaIpc handle.
  py::class_<Core>(module, "Core")
      .def(
          "create_workspace",
          [](Core& core, bool use_ipc) {
            const WorkspaceHandle handle = core.create_workspace(use_ipc);
            return py::make_tuple(handle.fd, py::bytes(handle.bytes));
          },
          py::arg("use_ipc"))
      .def(
          "map_peer", [](Core& core, int peer, int fd, const std::string& bytes) { core.map_peer(peer, {fd, bytes}); },
          py::arg("peer"), py::arg("fd"), py::arg("bytes"))
      .def("workspace_bytes", &Core::workspace_bytes)
      .def("send_marks", &Core::send_marks, py::call_guard<py::gil_scoped_release>())
      .def("peers_unseen", &Core::peers_unseen, py::call_guard<py::gil_scoped_release>())
      .def("prepare_all_reduce", &Core::prepare_all_reduce, py::keep_alive<0, 1>())
      .def("expired", &Core::expired)
      .def("abort", &Core::abort);

  module.def("make_emulated_core", &make_emulated_core);
  module.def("make_cuda_core", &make_cuda_core);
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
