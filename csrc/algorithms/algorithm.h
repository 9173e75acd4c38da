// Vocabulary of the descriptors of operations and algorithms. Every operation and algorithm file uses it.
//
// An operation defines what is computed. Its descriptor is a struct (example: all_reduce/operation.cuh) with
//
//   Args                                        parameter of its kernels; has a DeviceComm `comm`
//   kInfo                                       OperationInfo
//   serves(type)                                true if it has kernels for a data type
//   check(problem)                              throws std::invalid_argument for calls that no algorithm of it supports
//   check_buffers(problem, buffers)             (optional) throws std::invalid_argument for a call without a buffer
//                                               that kInfo calls optional and its parameters need
//   arguments(problem, tiling, grid) -> Args    part of Args that all launches of a call share; the caller sets `comm`
//   set_launch(args, problem, buffers, first, units)   sets the part of one launch: its range of the buffers
//   expect(problem, rank, i, input) -> bits     reference for tests: element i of the result on `rank`, where
//                                               input(r, j) is element j of rank r's input
//
// An algorithm defines how. Its descriptor is at the end of its file and has
//
//   Operation, kInfo                            AlgorithmInfo
//   kTunables                                   Tunables: the fields of TuningParameters that it reads, with their
//                                               bounds. Tables, tilings and candidates are checked by these bounds
//   kVariants, kernel<type, World, Variant>()   its kernels, all with the signature void(Operation::Args)
//   tile(problem, tuning, limits) -> Tiling     may throw std::invalid_argument
//   grid(problem, tiling, units, limits) -> Grid   of a launch of `units` units, for a tiling within kTunables. Throws
//                                               std::invalid_argument if workspace, device or kernels do not support it
//   candidates(problem, limits)                 tuning parameters worth measuring, simplest first. The first is used
//                                               where no table has a row
//   widest_cluster() -> Grid                    (optional, kernels with clusters) the launch that needs most of a
//                                               device
//
// algorithms/registry.def and optional/registry.def list the algorithms. Everything else derives from these lists:
// kernels and how they are loaded, names in errors and tables, tuner candidates, schedules of the deterministic
// emulator, `llm-comm algorithms`.
#pragma once

#include <string_view>
#include <vector>

#include "algorithms/launch_shape.h"
#include "llm_comm/wait.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Number of an algorithm in errors and in comparisons of calls. A build defines it (algorithms/kinds.h, written by
// CMake). Kernels compiled outside a build are user kernels.
template <class Algorithm>
inline constexpr OperationKind kKindOf = OperationKind::kUser;

}  // namespace llm_comm::inline LLM_COMM_TARGET

namespace llm_comm {

// Phases of two-shot algorithms, as errors number them.
inline constexpr uint32_t kScatter = 0;
inline constexpr uint32_t kGather = 1;

inline constexpr int kMaxBuffers = 9;
inline constexpr int kMaxTunables = 5;
inline constexpr int kMaxNamedValues = 13;

// A tensor of a call. It has the shape and type of the input, unless the operation's own Python file defines otherwise.
struct BufferInfo {
  const char* name = nullptr;
  bool is_output = false;
  bool is_optional = false;
};

// A parameter of a call, the same on all ranks.
struct ParameterInfo {
  const char* name = nullptr;
  bool is_rank = false;                           // a rank: 0 to world - 1
  const char* value_names[kMaxNamedValues] = {};  // names of the values 0, 1, ... in errors; empty: a number
};

struct OperationInfo {
  const char* name;   // "all_reduce"
  const char* title;  // "all-reduce"
  BufferInfo buffers[kMaxBuffers];
  ParameterInfo parameters[kMaxParameters] = {};
  // For operations that work on rows: the row length is a multiple of `row_multiple` and at most `max_row`. Else 0.
  uint32_t row_multiple = 0;
  uint32_t max_row = 0;
};

// A field of TuningParameters that an algorithm reads, with the values that a table may give it.
struct Tunable {
  const char* name = nullptr;
  uint32_t min = 0;
  uint32_t max = 0;
  bool is_power_of_two = false;
};

struct Tunables {
  Tunable tunable[kMaxTunables];

  // Upper bound of a tunable; 0 if there is none of this name.
  constexpr uint32_t max(std::string_view name) const {
    for (const Tunable& one : tunable) {
      if (one.name != nullptr && name == one.name) return one.max;
    }
    return 0;
  }
};

// Field with the name of a tunable; nullptr if there is none.
inline const uint32_t* tunable_of(const TuningParameters& tuning, std::string_view name) {
  if (name == "blocks") return &tuning.blocks;
  if (name == "threads") return &tuning.threads;
  if (name == "tile_lines") return &tuning.tile_lines;
  if (name == "cluster") return &tuning.cluster;
  // Depth 0 means that the algorithm uses its minimum, so it is not checked.
  return name == "depth" && tuning.depth != 0 ? &tuning.depth : nullptr;
}
// The cluster size is left out: its bound depends on the device, and grid() checks it.
inline const uint32_t* tunable_of(const Tiling& tiling, std::string_view name) {
  if (name == "blocks") return &tiling.blocks;
  if (name == "tile_lines") return &tiling.tile_lines;
  return name == "depth" ? &tiling.depth : nullptr;
}

// Throws std::invalid_argument if TuningParameters or a Tiling are outside the bounds of the tunables.
template <class Values>
void check_bounds(const Tunables& tunables, const Values& values) {
  for (const Tunable& bound : tunables.tunable) {
    const uint32_t* const value = bound.name == nullptr ? nullptr : tunable_of(values, bound.name);
    if (value == nullptr) continue;
    const bool is_power = *value == floor_power_of_two(*value | 1);
    if (*value >= bound.min && *value <= bound.max && (is_power || !bound.is_power_of_two)) continue;
    throw std::invalid_argument(std::string(bound.name) + " is " + std::to_string(*value) + "; it must be " +
                                std::to_string(bound.min) + " to " + std::to_string(bound.max) +
                                (bound.is_power_of_two ? " and a power of two" : ""));
  }
}

struct AlgorithmInfo {
  const char* name;        // "one_shot"
  const char* protocol;    // "LL"
  const char* title;       // "one-shot all-reduce", in errors
  uint32_t symmetric = 0;  // bit i: peers access buffer i, which must be in symmetric memory (direct.cuh)
  // Uses SwitchChannel. The kernels execute multimem instructions, so DeviceComm::multicast must be set.
  bool uses_multimem = false;
  bool sums_in_switch = false;    // the switch adds, in any order: only with `sum: any`
  bool ranks_may_differ = false;  // every rank reduces in the switch by itself: ranks may get different bits
  const char* wire = "";          // value of option `wire` that permits it: ranks exchange quantized values

  // True if the algorithm is used only when an option or a table row names it, whatever was measured. Copy engines pay
  // off for large messages only; NVLink multicast needs a set-up; quantized values are the operator's choice.
  bool needs_row() const {
    const std::string_view by = protocol;
    return by == "Port" || by == "CE" || uses_multimem || *wire != 0;
  }
};

// A list of descriptors.
template <class... Algorithms>
struct AlgorithmList {
  // Calls step.operator()<Algorithm>() for each, in order.
  template <class Step>
  static void for_each(Step step) {
    (step.template operator()<Algorithms>(), ...);
  }

  // Calls step.operator()<Algorithm>() for the algorithm at `index`.
  template <class Step>
  static void at(uint32_t index, Step step) {
    uint32_t i = 0;
    ((i++ == index ? step.template operator()<Algorithms>() : void()), ...);
  }
};

// Throws std::invalid_argument for calls that no algorithm of the operation supports.
template <class Operation>
void check_problem(const Problem& problem) {
  constexpr const OperationInfo& info = Operation::kInfo;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(std::string(info.title) + ": " + why);
  };
  if (problem.count == 0) refuse("there are no elements");
  if (problem.world < 2 || problem.world > static_cast<uint32_t>(kMaxWorldSize)) {
    refuse("a world of " + std::to_string(problem.world) + "; it takes 2 to " + std::to_string(kMaxWorldSize));
  }
  if (!Operation::serves(problem.type)) refuse(std::string("it has no kernels for ") + data_type_name(problem.type));
  const bool has_rows = info.row_multiple != 0;
  if (has_rows && (problem.row == 0 || problem.row % info.row_multiple != 0 || problem.row > info.max_row)) {
    refuse("rows of " + std::to_string(problem.row) + " elements; they must have a multiple of " +
           std::to_string(info.row_multiple) + " up to " + std::to_string(info.max_row));
  }
  if (has_rows ? problem.count % problem.row != 0 : problem.row != 0) {
    refuse(std::to_string(problem.count) + " elements are not rows of " + std::to_string(problem.row));
  }
  for (int i = 0; i < kMaxParameters; ++i) {
    const double value = problem.parameter[i];
    if (info.parameters[i].name == nullptr || !info.parameters[i].is_rank) continue;
    if (!(value >= 0 && value < problem.world))
      refuse(std::string(info.parameters[i].name) + " is not one of its ranks");
  }
  Operation::check(problem);
}

// Shape of all launches of a call.
template <class Algorithm>
Shape shape_of(const Problem& problem, const Tiling& tiling, const Limits& limits) {
  check_problem<typename Algorithm::Operation>(problem);
  if (tiling.launch_units == 0) {
    throw std::invalid_argument("a slot of " + std::to_string(limits.slot_bytes) +
                                " bytes holds no part of the message: raise workspace_bytes");
  }
  check_bounds(Algorithm::kTunables, tiling);
  const uint64_t units = problem.units();
  const uint64_t whole = units < tiling.launch_units ? units : tiling.launch_units;
  const uint64_t launches = divide_up(units, whole);
  // Peers receive the address where a tensor begins, not where a launch begins.
  if (Algorithm::kInfo.symmetric != 0 && launches > 1) throw std::invalid_argument("the message takes one launch");
  return {tiling, launches, Algorithm::grid(problem, tiling, whole, limits),
          Algorithm::grid(problem, tiling, units - (launches - 1) * whole, limits)};
}

// True if the algorithm has kernels for exactly these data types.
template <class Algorithm, DataType... types>
constexpr bool serves_exactly() {
  uint32_t served = 0;
  for (uint32_t i = 0; i < kDataTypes; ++i) served += Algorithm::Operation::serves(static_cast<DataType>(i));
  return served == sizeof...(types) && (Algorithm::Operation::serves(types) && ...);
}

template <class Algorithm>
std::vector<DataType> types_of() {
  std::vector<DataType> types;
  for (uint32_t i = 0; i < kDataTypes; ++i) {
    if (Algorithm::Operation::serves(static_cast<DataType>(i))) types.push_back(static_cast<DataType>(i));
  }
  return types;
}

}  // namespace llm_comm
