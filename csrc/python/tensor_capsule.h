// Exposes memory of the core as a tensor by DLPack. Any library that supports DLPack can use the memory without a copy;
// its tensor owns the memory.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

namespace llm_comm::python {

// Tells whether the tensor made from a capsule still exists.
class Loan {
 public:
  explicit Loan(std::weak_ptr<void> tensor) : tensor_(std::move(tensor)) {}
  bool has_ended() const { return tensor_.expired(); }

 private:
  std::weak_ptr<void> tensor_;
};

struct LentTensor {
  pybind11::capsule capsule;  // "dltensor" of `bytes` unsigned bytes
  Loan loan;
};

// `memory`: pointer to the first byte, which also owns the memory. `device`: CUDA device number, or -1 for host memory.
LentTensor lend_as_tensor(std::shared_ptr<char> memory, uint64_t bytes, int device);

}  // namespace llm_comm::python
