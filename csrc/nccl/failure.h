// Failure: an exception with the ncclResult_t that the C API returns for it.
#pragma once

#include <stdexcept>
#include <string>

#include "nccl/nccl_types.h"

namespace llm_comm::nccl {

class Failure : public std::runtime_error {
 public:
  Failure(ncclResult_t result, const std::string& text) : std::runtime_error(text), result_(result) {}
  ncclResult_t result() const { return result_; }

 private:
  ncclResult_t result_;
};

}  // namespace llm_comm::nccl
