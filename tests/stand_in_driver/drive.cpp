// Drives host/cuda/multicast_memory.cpp as the ranks of a communicator would, with the stand-in for the driver: it knows no
// other. What is resolved and called goes to stdout, a line each: the rank, and the name.
//
//   drive LIBRARY WORLD [fail NAME | variable NAME VALUE | unsupported | odd-size]
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/cuda/multicast_memory.h"

using llm_comm::host::MulticastDriver;
using llm_comm::host::MulticastMemory;
using llm_comm::host::WorkspaceHandle;

namespace {

void* library = nullptr;
std::string variable;
std::string value;

template <class Function>
Function control(const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

void* resolve(const char* name) {
  std::printf("resolve %s\n", name);
  void* const found = dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("the stand-in has no ") + name);
  return found;
}

const char* get_variable(const char* name) { return variable == name ? value.c_str() : nullptr; }

// One step of the set-up on all ranks, and a vote: whether it has succeeded on all.
bool on_all(int world, const char* step, const std::function<void(int)>& run) {
  bool succeeded = true;
  for (int rank = 0; rank < world; ++rank) {
    control<void (*)(int)>("stand_in_rank")(rank);
    try {
      run(rank);
    } catch (const std::exception& error) {
      std::printf("%d FAILED %s: %s\n", rank, step, error.what());
      succeeded = false;
    }
  }
  std::printf("VOTE %s: %s\n", step, succeeded ? "yes" : "no");
  return succeeded;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 2;
  const int world = std::stoi(arguments[2]);
  const std::string how = count > 3 ? arguments[3] : "";
  uint64_t bytes = 4 << 20;
  if (how == "fail") control<void (*)(const char*)>("stand_in_fail")(arguments[4]);
  if (how == "unsupported") control<void (*)()>("stand_in_without_multicast")();
  if (how == "odd-size") bytes += 4096;
  if (how == "variable") {
    variable = arguments[4];
    value = arguments[5];
  }
  std::vector<std::unique_ptr<MulticastMemory>> ranks(world);
  WorkspaceHandle handle;
  const auto open = [&](int rank) {
    ranks[rank] = std::make_unique<MulticastMemory>(MulticastDriver{resolve, get_variable}, rank, world);
  };
  const auto share = [&](int rank) {
    if (rank == 0) {
      handle = ranks[0]->create(bytes);
    } else if (handle.fd >= 0) {  // without one, rank 0 has said no
      ranks[rank]->join(bytes, handle);
    }
  };
  const auto add = [&](int rank) { ranks[rank]->add_device(); };
  const auto bind = [&](int rank) {
    if (ranks[rank]->bind(500 + rank, bytes) == nullptr) throw std::runtime_error("mapped nowhere");
  };
  const bool is_up = on_all(world, "open", open) && on_all(world, "share", share) && on_all(world, "add", add) &&
                     on_all(world, "bind", bind);
  std::printf(is_up ? "UP\n" : "DOWN\n");
  for (int rank = 0; rank < world; ++rank) {
    control<void (*)(int)>("stand_in_rank")(rank);
    if (is_up && rank == 0) ranks[0]->drop();  // its end has nothing left to do then
    ranks[rank].reset();
  }
  std::printf("LEAKED %d\n", control<int (*)()>("stand_in_leaked")());
  return 0;
}
