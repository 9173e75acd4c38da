// DataType from its number, which Python knows from data_types().
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/planner.h"  // for DataType

namespace llm_comm::python {

// Throws std::invalid_argument for an unknown number.
inline DataType data_type_at(uint32_t number) {
  if (number >= kDataTypes) throw std::invalid_argument("there is no data type " + std::to_string(number));
  return static_cast<DataType>(number);
}

}  // namespace llm_comm::python
