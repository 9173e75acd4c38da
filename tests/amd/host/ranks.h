// Two ranks of a communicator on the stub's devices, in one process.
#pragma once

#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "algorithms/all_reduce/operation.cuh"
#include "host/descriptor.h"
#include "host/hip/hip_core.h"
#include "host/planner.h"
#include "stub.h"

namespace hip_test {

using namespace llm_comm;  // NOLINT: a test of its host code

inline constexpr uint32_t kRanks = 2;
inline constexpr uint64_t kSlotBytes = 256 * 1024;
inline constexpr uint64_t kStagingBytes = 1 << 20;
inline constexpr uint64_t kWindowBytes = 1 << 20;
// kMarkWord of p2p_test.cuh. Only one translation unit may include that file: it defines a kernel.
inline constexpr uint32_t kMark = 0x70327000u;

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("expected: " + what);
}

// Calls what must throw an Error whose text has `part`.
template <class Error, class Call>
void expect_error(const std::string& part, Call call) {
  try {
    call();
  } catch (const Error& error) {
    expect(std::string(error.what()).find(part) != std::string::npos, "'" + part + "' in: " + error.what());
    return;
  }
  expect(false, "an error with '" + part + "'");
}

// Registry number of an algorithm of the all-reduce.
inline uint32_t all_reduce(const std::string& name) {
  const std::vector<host::Algorithm>& all = host::algorithms();
  for (uint32_t i = 0; i < all.size(); ++i) {
    if (all[i].operation->name == std::string("all_reduce") && all[i].info->name == name) {
      return i;
    }
  }
  throw std::logic_error("no all-reduce " + name);
}

inline Problem problem_of(uint64_t count) { return {count, 0, DataType::kBFloat16, kRanks, {}}; }
inline Shape shape_of(uint32_t algorithm, const Problem& problem) {
  const host::Algorithm& of = host::algorithms()[algorithm];
  const Limits limits{kSlotBytes, stub::kMultiprocessors, 1, 0, kStagingBytes};
  return of.shape(problem, of.candidates(problem, limits).at(0), limits);
}

// The kernel that proves at set-up that stores arrive, as a device would run it. Other kernels do nothing.
inline void run_p2p_test(const stub::Launch& launch, const void* arguments) {
  if (launch.kernel.find("p2p_test") == std::string::npos) return;
  const auto& comm = *static_cast<const DeviceComm*>(arguments);
  for (uint32_t peer = 0; peer < comm.world_size; ++peer) {
    const Line mark{{kMark, comm.rank, peer, 0}};
    std::memcpy(comm.workspace[peer] + kMarksOffset + comm.rank * sizeof(Line), &mark, sizeof(mark));
  }
}

class Ranks {
 public:
  explicit Ranks(host::Sharing sharing, bool check_calls = false) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      host::CoreOptions options{static_cast<int>(rank), kRanks, kSlotBytes, 1.0, true, check_calls, kStagingBytes};
      cores_.push_back(host::make_hip_core(options, static_cast<int>(rank)));
    }
    exchange([&](uint32_t rank) { return core(rank).create_workspace(sharing); },
             [&](uint32_t rank, int peer, const host::WorkspaceHandle& handle) { core(rank).map_peer(peer, handle); });
  }

  host::Core& core(uint32_t rank) { return *cores_[rank]; }

  void open_window() {
    exchange(
        [&](uint32_t rank) { return core(rank).create_window(0, kWindowBytes); },
        [&](uint32_t rank, int peer, const host::WorkspaceHandle& handle) { core(rank).map_window(0, peer, handle); });
  }

  void send_marks() {
    for (auto& core : cores_) core->send_marks();
    for (auto& core : cores_) expect(core->peers_unseen().empty(), "marks of all peers");
  }

  void release() {
    for (auto& core : cores_) core->begin_release();
    for (auto& core : cores_) core->release_workspaces();
  }
  void restore() {
    exchange(
        [&](uint32_t rank) { return core(rank).restore_workspace(); },
        [&](uint32_t rank, int peer, const host::WorkspaceHandle& handle) { core(rank).restore_peer(peer, handle); });
    for (auto& core : cores_) core->end_release();
  }

 private:
  // Every rank makes a handle, and every other rank takes it. Closes the descriptors.
  template <class Make, class Take>
  void exchange(Make make, Take take) {
    std::vector<host::WorkspaceHandle> handles;
    std::vector<host::Descriptor> owners;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      handles.push_back(make(rank));
      owners.emplace_back(handles.back().fd);
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (uint32_t peer = 0; peer < kRanks; ++peer) {
        if (peer != rank) take(rank, static_cast<int>(peer), handles[peer]);
      }
    }
  }

  std::vector<std::unique_ptr<host::Core>> cores_;
};

}  // namespace hip_test
