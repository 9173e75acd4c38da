// llm_comm._core: the Core class and what the build contains. No logic here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "host/build_config.h"
#include "host/core.h"

namespace py = pybind11;
using namespace llm_comm::host;  // NOLINT: a binding file

namespace {

// A core on a GPU waits for its kernels before it goes: up to their time-out, in which other threads must run.
struct DeleteWithoutGil {
  void operator()(Core* core) const {
    const py::gil_scoped_release release;
    delete core;
  }
};
using CoreHolder = std::unique_ptr<Core, DeleteWithoutGil>;

// Members are destroyed last to first: the call before the core that it belongs to.
template <class Call>
struct BoundCall {
  py::object core;
  std::unique_ptr<Call> call;
};

// Addresses of tensors, then the handle of a stream. Those in kOptional may be 0; another tensor without memory (one of
// torch's fake tensors, say) would break the CUDA context.
template <class Call>
constexpr uint32_t kOptional = 0;
template <>
constexpr uint32_t kOptional<PreparedAddRmsNorm> = 1u << 1 | 1u << 5;  // residual and scale

constexpr Py_ssize_t argument_count(const PreparedCall*) { return 3; }
bool run(PreparedCall& call, const uint64_t* a) { return call.run(a[0], a[1], a[2]); }

constexpr Py_ssize_t argument_count(const PreparedAddRmsNorm*) { return 7; }
bool run(PreparedAddRmsNorm& call, const uint64_t* a) { return call.run({a[0], a[1], a[2], a[3], a[4], a[5]}, a[6]); }

// run(address, ..., stream) -> bool. Every eager call goes through it, so it uses CPython's own calling convention:
// pybind11's takes twice the time.
template <class Call>
PyObject* run_bound_call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  constexpr Py_ssize_t kCount = argument_count(static_cast<const Call*>(nullptr));
  if (count != kCount) {
    PyErr_Format(PyExc_TypeError, "run() takes %zd addresses and a stream; %zd arguments given", kCount - 1, count);
    return nullptr;
  }
  uint64_t values[kCount];
  for (Py_ssize_t i = 0; i < kCount; ++i) values[i] = PyLong_AsUnsignedLongLong(arguments[i]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < kCount - 1; ++i) {
    if (values[i] == 0 && (kOptional<Call> >> i & 1) == 0) {
      PyErr_SetString(PyExc_ValueError, "a tensor has no memory: it is a fake tensor or a wrapper of others");
      return nullptr;
    }
  }
  Call& call = *static_cast<BoundCall<Call>*>(PyCapsule_GetPointer(capsule, nullptr))->call;
  bool enqueued = false;
  std::string error;
  PyThreadState* const thread = PyEval_SaveThread();  // a launch waits where the queue of the GPU is full
  try {
    enqueued = run(call, values);
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  PyEval_RestoreThread(thread);
  if (!error.empty()) {
    PyErr_SetString(PyExc_RuntimeError, error.c_str());
    return nullptr;
  }
  return PyBool_FromLong(enqueued);
}

template <class Call>
py::object as_function(py::object core, std::unique_ptr<Call> call) {
  static PyMethodDef definition = {"run",
                                   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_bound_call<Call>)),
                                   METH_FASTCALL, nullptr};
  const py::capsule capsule(new BoundCall<Call>{std::move(core), std::move(call)},
                            [](void* bound) { delete static_cast<BoundCall<Call>*>(bound); });
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
  if (!function) throw py::error_already_set();
  return function;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.attr("version") = LLM_COMM_VERSION;
  module.attr("cuda_archs") = LLM_COMM_CUDA_ARCHS;
  module.attr("cuda_ptx_archs") = LLM_COMM_CUDA_PTX_ARCHS;
  module.attr("nvcc_version") = LLM_COMM_NVCC_VERSION;
  module.attr("bounded_waits") = LLM_COMM_BOUNDED_WAITS != 0;

  py::class_<CoreOptions>(module, "CoreOptions")
      .def(py::init([](int rank, int world_size, uint64_t slot_bytes, double timeout_s, bool dependent_launch,
                       bool check_calls) {
             return CoreOptions{rank, world_size, slot_bytes, timeout_s, dependent_launch, check_calls};
           }),
           py::kw_only(), py::arg("rank"), py::arg("world_size"), py::arg("slot_bytes"), py::arg("timeout_s"),
           py::arg("dependent_launch"), py::arg("check_calls"));

  py::class_<LaunchPlan>(module, "LaunchPlan")
      .def(py::init(
               [](uint32_t algorithm, uint32_t blocks, uint32_t tile_lines_log2, uint32_t depth, uint64_t chunk_count) {
                 return LaunchPlan{algorithm, blocks, tile_lines_log2, depth, chunk_count};
               }),
           py::kw_only(), py::arg("algorithm"), py::arg("blocks"), py::arg("tile_lines_log2"), py::arg("depth"),
           py::arg("chunk_count"));

  py::class_<FusedPlan>(module, "FusedPlan")
      .def(py::init([](uint32_t algorithm, uint32_t blocks, uint32_t tile_lines, uint32_t cluster_blocks,
                       uint32_t depth, uint64_t chunk_rows) {
             return FusedPlan{algorithm, blocks, tile_lines, cluster_blocks, depth, chunk_rows};
           }),
           py::kw_only(), py::arg("algorithm"), py::arg("blocks"), py::arg("tile_lines"), py::arg("cluster_blocks"),
           py::arg("depth"), py::arg("chunk_rows"));

  py::class_<AddRmsNorm>(module, "AddRmsNorm")
      .def(py::init([](uint64_t rows, uint32_t hidden, uint32_t data_type, uint32_t quantization, float epsilon) {
             return AddRmsNorm{rows, hidden, data_type, quantization, epsilon};
           }),
           py::kw_only(), py::arg("rows"), py::arg("hidden"), py::arg("data_type"), py::arg("quantization"),
           py::arg("epsilon"));

  py::class_<Call>(module, "Call")
      .def_readonly("operation", &Call::operation)
      .def_readonly("data_type", &Call::data_type)
      .def_readonly("row", &Call::row)
      .def_readonly("count", &Call::count)
      .def_readonly("number", &Call::number);

  py::class_<OperationError>(module, "OperationError")
      .def_readonly("cause", &OperationError::cause)
      .def_readonly("rank", &OperationError::rank)
      .def_readonly("peer", &OperationError::peer)
      .def_readonly("operation", &OperationError::operation)
      .def_readonly("phase", &OperationError::phase)
      .def_readonly("sequence", &OperationError::sequence)
      .def_readonly("bytes", &OperationError::bytes)
      .def_readonly("calls", &OperationError::calls);

  // Handles are (fd, bytes): a descriptor that the caller now owns and b"", or -1 and the bytes of a cudaIpc handle.
  py::class_<Core, CoreHolder>(module, "Core")
      .def(
          "create_workspace",
          [](Core& core, bool use_ipc) {
            const WorkspaceHandle handle = [&] {
              const py::gil_scoped_release others_may_run;
              return core.create_workspace(use_ipc);
            }();
            return py::make_tuple(handle.fd, py::bytes(handle.bytes));
          },
          py::arg("use_ipc"))
      .def(
          "map_peer", [](Core& core, int peer, int fd, const std::string& bytes) { core.map_peer(peer, {fd, bytes}); },
          py::arg("peer"), py::arg("fd"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def("workspace_bytes", &Core::workspace_bytes)
      .def("max_cluster_blocks", &Core::max_cluster_blocks, py::call_guard<py::gil_scoped_release>())
      .def("send_marks", &Core::send_marks, py::call_guard<py::gil_scoped_release>())
      .def("peers_unseen", &Core::peers_unseen, py::call_guard<py::gil_scoped_release>())
      .def("prepare_all_reduce",
           [](py::object core, uint64_t count, uint32_t data_type, const LaunchPlan& plan) {
             auto call = core.cast<Core&>().prepare_all_reduce(count, data_type, plan);
             return as_function(std::move(core), std::move(call));
           })
      .def("prepare_add_rms_norm",
           [](py::object core, const AddRmsNorm& operation, const FusedPlan& plan) {
             auto call = core.cast<Core&>().prepare_add_rms_norm(operation, plan);
             return as_function(std::move(core), std::move(call));
           })
      .def("error", &Core::error)
      .def("abort", &Core::abort)
      .def("peer_exited", &Core::peer_exited)
      .def("last_call", &Core::last_call)
      .def("operations_ended", &Core::operations_ended, py::call_guard<py::gil_scoped_release>());

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
