// The registry for everybody who does not launch kernels: what algorithms there are, and how a call of one would be shaped.
// The one place where Python, other libraries and tests ask. Pure functions; nothing here touches a device.
#pragma once

#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/linear/layer.h"  // what layers are served

namespace llm_comm::host {

struct Algorithm {
  const OperationInfo* operation;
  const AlgorithmInfo* info;
  const Tunables* tunables;
  std::vector<DataType> types;
  // Cuts a choice to size. Throws std::invalid_argument for what it, the workspace or the device does not take.
  Shape (*shape)(const Problem&, const Choice&, const Limits&);
  // Choices worth measuring, simplest first.
  std::vector<Choice> (*candidates)(const Problem&, const Limits&);
};

// By number: algorithms/registry.def, optional/registry.def, then lists of the user's own.
const std::vector<Algorithm>& algorithms();

}  // namespace llm_comm::host
