#include "nccl/selection.h"

#include <stdexcept>

#include "algorithms/parts.h"
#include "host/planner.h"

namespace llm_comm::nccl {

namespace {

// How many bytes the root of a broadcast sends at most. To one rank: as far as an all-gather of such parts, which sends as much, is
// clearly faster than NCCL's broadcast (docs/results/2026-11-25_h100x2_nccl_tests.json). To more, not measured: the root stores to
// each of them in turn, where NCCL has the ranks pass the bytes on.
constexpr uint64_t max_broadcast_bytes(uint32_t world) { return world == 2 ? 8 << 20 : 1 << 20; }

std::optional<DataType> summed_type(ncclDataType_t type) {
  switch (type) {
    case ncclBfloat16:
      return DataType::kBFloat16;
    case ncclFloat16:
      return DataType::kFloat16;
    case ncclFloat32:
      return DataType::kFloat32;
    default:
      return std::nullopt;
  }
}

// The operation of the registry that does it: a broadcast gathers parts of which only the root has one.
const char* registered(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kAllGather:
    case Operation::kBroadcast:
      break;
  }
  return "all_gather";
}

}  // namespace

uint64_t Message::part_bytes() const { return count * bytes_of(type); }

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "AllReduce";
    case Operation::kAllGather:
      return "AllGather";
    case Operation::kReduceScatter:
      return "ReduceScatter";
    case Operation::kBroadcast:
      return "Broadcast";
  }
  return "?";
}

uint64_t bytes_of(ncclDataType_t type) {
  constexpr uint64_t kBytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  const auto index = static_cast<unsigned>(type);
  return index < ncclNumTypes ? kBytes[index] : 0;
}

Decision Selection::decide(const Message& message) const {
  const auto forwarded = [](const std::string& why) { return Decision{std::nullopt, why}; };
  const bool sums = message.operation == Operation::kAllReduce || message.operation == Operation::kReduceScatter;
  if (sums && message.reduction != ncclSum) return forwarded("no sum");
  Problem problem{message.count, 0, DataType::kByte, world_, {}};
  if (sums) {
    const auto type = summed_type(message.type);
    if (!type) return forwarded("its type is none of bfloat16, float16 and float32");
    problem.type = *type;
  } else {
    problem.count *= bytes_of(message.type);
  }
  const uint64_t bytes = message.part_bytes();
  if (bytes > table_.max_message_bytes && !serves_all_) return forwarded("larger than " + table_.name + " goes");
  if (message.operation == Operation::kBroadcast && bytes * (world_ - 1) > max_broadcast_bytes(world_) &&
      !serves_all_) {
    return forwarded("a large broadcast");
  }
  if (message.operation != Operation::kAllReduce) {
    problem.parameter[kRows] = 1;
    for (uint32_t rank = 0; rank < world_; ++rank) {
      const bool has_part = message.operation != Operation::kBroadcast || static_cast<int>(rank) == message.root;
      problem.parameter[kFirstSize + rank] = has_part ? static_cast<double>(problem.count) : 0;
    }
  }
  const Row* row = nullptr;
  for (const Row& candidate : table_.rows) {
    if (candidate.operation != registered(message.operation)) continue;
    row = &candidate;
    if (bytes <= candidate.up_to) break;
  }
  if (row == nullptr) return forwarded(table_.name + " has no row for it");
  const host::Algorithm& algorithm = host::algorithms()[row->algorithm];
  try {
    const Shape shape = algorithm.shape(problem, row->choice, limits_);
    return {Plan{row->algorithm, problem, shape.tiling},
            std::string(algorithm.info->name) + " " + algorithm.info->protocol + " (" + table_.name + ")"};
  } catch (const std::invalid_argument& error) {
    return forwarded(error.what());
  }
}

}  // namespace llm_comm::nccl
