// Memory of the core as a tensor, by DLPack: any library that knows it can use the memory without a copy, and owns it as long as
// its tensor lives.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

namespace llm_comm::python {

// What tells whether a tensor that was made of a capsule is still there.
class Loan {
 public:
  explicit Loan(std::weak_ptr<void> tensor) : tensor_(std::move(tensor)) {}
  bool has_ended() const { return tensor_.expired(); }

 private:
  std::weak_ptr<void> tensor_;
};

struct LentTensor {
  pybind11::capsule capsule;  // "dltensor", of `bytes` unsigned bytes
  Loan loan;
};

// `memory`: its first byte, and what keeps it. `device`: number of the CUDA device, or -1 for memory of the host.
LentTensor lend_as_tensor(std::shared_ptr<char> memory, uint64_t bytes, int device);

}  // namespace llm_comm::python
