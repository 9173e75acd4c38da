#include "python/tensor_capsule.h"

#include <utility>

#include "host/own_process.h"

namespace llm_comm::python {

namespace {

namespace py = pybind11;

// Structs of DLPack, whose layout is stable: https://dmlc.github.io/dlpack/latest/c_api.html
struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // nullptr: contiguous
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};

constexpr int32_t kHost = 1;
constexpr int32_t kCuda = 2;
constexpr uint8_t kUnsigned = 1;
constexpr const char* kName = "dltensor";  // a consumer renames it to "used_dltensor"

// Value of DLManagedTensor::manager. The tensor no longer exists when `tensor` is destroyed.
struct Manager {
  std::shared_ptr<void> tensor;
  int64_t shape[1];
  DLManagedTensor managed;
  host::OwnProcess maker{};
};

// May run in any thread, with or without the GIL. In a forked child the memory is left to the parent.
void drop(DLManagedTensor* managed) {
  auto* const manager = static_cast<Manager*>(managed->manager);
  if (manager->maker.is_this()) delete manager;
}

}  // namespace

LentTensor lend_as_tensor(std::shared_ptr<char> memory, uint64_t bytes, int device) {
  char* const first = memory.get();
  auto* const manager = new Manager{std::make_shared<std::shared_ptr<char>>(std::move(memory)), {}, {}, {}};
  manager->shape[0] = static_cast<int64_t>(bytes);
  manager->managed = {
      {first, device < 0 ? kHost : kCuda, device < 0 ? 0 : device, 1, kUnsigned, 8, 1, manager->shape, nullptr, 0},
      manager,
      &drop};
  const Loan loan(manager->tensor);
  PyObject* const capsule = PyCapsule_New(&manager->managed, kName, [](PyObject* object) {
    if (PyCapsule_IsValid(object, kName) == 0) return;  // a consumer owns it
    drop(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(object, kName)));
  });
  if (capsule == nullptr) {
    drop(&manager->managed);
    throw py::error_already_set();
  }
  return {py::reinterpret_steal<py::capsule>(capsule), loan};
}

}  // namespace llm_comm::python
