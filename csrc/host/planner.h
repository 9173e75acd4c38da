// Planner: the list of algorithms, and the shape that a call of each would have. Python, the NCCL library, tables and
// tests use it. Pure functions that touch no device.
#pragma once

#include <vector>

#include "algorithms/algorithm.h"
#include "algorithms/linear/experts.h"  // experts that are supported
#include "algorithms/linear/layer.h"    // layers that are supported

namespace llm_comm::host {

struct Algorithm {
  const OperationInfo* operation;
  const AlgorithmInfo* info;
  const Tunables* tunables;
  std::vector<DataType> types;
  // Fits tuning parameters to a call. Throws std::invalid_argument if the algorithm, the workspace or the device does
  // not support them.
  Shape (*shape)(const Problem&, const TuningParameters&, const Limits&);
  // Tuning parameters worth measuring, simplest first.
  std::vector<TuningParameters> (*candidates)(const Problem&, const Limits&);
};

// All algorithms by registry number: algorithms/registry.def, optional/registry.def, then the user's own lists.
const std::vector<Algorithm>& algorithms();

}  // namespace llm_comm::host
