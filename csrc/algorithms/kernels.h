// The kernels of an algorithm by data type, world size and variant. They are compiled in translation units of their own, which
// CMake makes from the lists of algorithms: for GPUs one for each algorithm, data type and half of the worlds, so that a build
// uses all cores (all of an algorithm in one with LLM_COMM_SPLIT_KERNELS=OFF). Everybody else only asks for an address.
#pragma once

#include <utility>

#include "algorithms/algorithm.h"
#include "algorithms/kinds.h"

namespace llm_comm::inline LLM_COMM_TARGET {

enum class Worlds : uint32_t { kEven = 0, kOdd = 1 };

template <class Algorithm>
using KernelOf = void (*)(typename Algorithm::Operation::Args);

template <class Algorithm, DataType D, Worlds Half>
struct Kernels {
  // nullptr where there is no such kernel. Defined below for the translation unit that compiles it.
  static KernelOf<Algorithm> find(uint32_t world, uint32_t variant);
};

template <class Algorithm, DataType D, Worlds Half>
KernelOf<Algorithm> Kernels<Algorithm, D, Half>::find(uint32_t world, uint32_t variant) {
  KernelOf<Algorithm> found = nullptr;
  const auto look_at_world = [&]<int World>() {
    [&]<uint32_t... Variant>(std::integer_sequence<uint32_t, Variant...>) {
      ((variant == Variant ? void(found = Algorithm::template kernel<D, World, Variant>()) : void()), ...);
    }(std::make_integer_sequence<uint32_t, Algorithm::kVariants>());
  };
  constexpr int kFirst = 2 + static_cast<int>(Half);
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((world == kFirst + 2 * I ? look_at_world.template operator()<kFirst + 2 * I>() : void()), ...);
  }(std::make_integer_sequence<int, (kMaxWorldSize - kFirst) / 2 + 1>());
  return found;
}

// The same where type and world are known at run time only.
template <class Algorithm>
KernelOf<Algorithm> find_kernel(DataType type, uint32_t world, uint32_t variant) {
  KernelOf<Algorithm> found = nullptr;
  const auto look_at_type = [&]<DataType D>() {
    if constexpr (Algorithm::Operation::serves(D)) {
      if (type != D) return;
      found = world % 2 == 0 ? Kernels<Algorithm, D, Worlds::kEven>::find(world, variant)
                             : Kernels<Algorithm, D, Worlds::kOdd>::find(world, variant);
    }
  };
  look_at_type.template operator()<DataType::kBFloat16>();
  look_at_type.template operator()<DataType::kFloat16>();
  look_at_type.template operator()<DataType::kFloat32>();
  look_at_type.template operator()<DataType::kByte>();
  return found;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
