#include "python/bound_call.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/own_process.h"

namespace py = pybind11;

namespace llm_comm::python {

namespace {

// Members are destroyed in reverse order: the call before the core that it belongs to.
struct BoundCall {
  py::object core;
  host::CountedCall call;
  Py_ssize_t buffers;
  uint32_t optional;  // bit i: buffer i may be 0
  host::OwnProcess maker{};
};

// Of any call, also of those that are no operation of ranks.
constexpr Py_ssize_t kMaxAddresses = 16;
static_assert(kMaxAddresses >= kMaxBuffers);

// run(address, ..., stream) -> bool. Every eager call passes through it, so it uses CPython's calling convention:
// pybind11's takes twice as long. It rejects an address of 0 for a required buffer: a tensor without memory (for
// example a fake tensor of torch) would corrupt the CUDA context.
PyObject* run_bound_call(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  const BoundCall& bound = *static_cast<BoundCall*>(PyCapsule_GetPointer(capsule, nullptr));
  if (count != bound.buffers + 1) {
    PyErr_Format(PyExc_TypeError, "run() takes %zd addresses and a stream; %zd arguments given", bound.buffers, count);
    return nullptr;
  }
  if (!bound.maker.is_this()) {  // before any lock, which a thread of the parent may have held at the fork
    PyErr_SetString(PyExc_RuntimeError,
                    "this communicator belongs to the process that this one was forked from: no rank waits for a call "
                    "from here. Make a communicator in this process");
    return nullptr;
  }
  uint64_t values[kMaxAddresses + 1];
  for (Py_ssize_t i = 0; i < count; ++i) values[i] = PyLong_AsUnsignedLongLong(arguments[i]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < bound.buffers; ++i) {
    if (values[i] == 0 && (bound.optional >> i & 1) == 0) {
      PyErr_SetString(PyExc_ValueError, "a tensor has no memory: it is a fake tensor or a wrapper of others");
      return nullptr;
    }
  }
  bool enqueued = false;
  std::string error;
  PyThreadState* const thread = PyEval_SaveThread();  // a launch blocks while the GPU's queue is full
  try {
    enqueued = bound.call.run(values, values[bound.buffers]) != host::Outcome::kFailed;
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

}  // namespace

py::object as_function(py::object core, host::CountedCall call, Py_ssize_t buffers, uint32_t optional) {
  if (buffers > kMaxAddresses) throw std::logic_error("a call of " + std::to_string(buffers) + " addresses");
  static PyMethodDef definition = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_bound_call)),
                                   METH_FASTCALL, nullptr};
  const py::capsule capsule(new BoundCall{std::move(core), std::move(call), buffers, optional},
                            [](void* bound) { delete static_cast<BoundCall*>(bound); });
  auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, capsule.ptr()));
  if (!function) throw py::error_already_set();
  return function;
}

py::object as_function(py::object core, host::CountedCall call, const OperationInfo& operation) {
  Py_ssize_t buffers = 0;
  uint32_t optional = 0;
  for (const BufferInfo& buffer : operation.buffers) {
    if (buffer.name == nullptr) break;
    if (buffer.is_optional) optional |= 1u << buffers;
    ++buffers;
  }
  return as_function(std::move(core), std::move(call), buffers, optional);
}

}  // namespace llm_comm::python
