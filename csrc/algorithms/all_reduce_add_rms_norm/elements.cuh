// Callers' tensors, read and written in packs of neighbouring elements.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/operation.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <DataType D>
LLM_COMM_DEVICE Pack<D, kElementsPerLine> as_pack(Line line) {
  return __builtin_bit_cast(Pack<D, kElementsPerLine>, line);
}

// A load of Width neighbours of a caller's tensor in steps, so that others can be under way before its values are waited
// for. Construct it before grid_dependency_wait(). It is made unconditionally, of `spare` memory where nothing is wanted:
// under a condition, its registers would have to be cleared first.
template <DataType D, uint32_t Width>
class PackLoad {
 public:
  using Storage = typename Element<D>::Storage;

  LLM_COMM_DEVICE PackLoad(const Storage* first, bool wanted, bool is_aligned, const void* spare)
      : first_(first), address_(wanted && is_aligned ? first : spare), later_(wanted && !is_aligned) {}

  // Changes with all that begin() needs (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(address_); }

  LLM_COMM_DEVICE void begin() { load_words(address_, words_.word); }

  // The values; unspecified unless wanted. What is not aligned is loaded only now, element by element. By words:
  // those of an aligned tensor are not taken apart before they are used.
  LLM_COMM_DEVICE Pack<D, Width> end() {
    if (later_) {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < Width / 2; ++i) {
        words_.word[i] = static_cast<uint32_t>(first_[2 * i + 1]) << 16 | first_[2 * i];
      }
    }
    return __builtin_bit_cast(Pack<D, Width>, words_);
  }

 private:
  struct alignas(sizeof(Storage) * Width) Words {
    uint32_t word[Width / 2];
  };

  const Storage* first_;
  const void* address_;
  bool later_;
  Words words_{};
};

template <DataType D>
using LineLoad = PackLoad<D, kElementsPerLine>;

// A caller's tensor, read and written in packs of Width neighbours that start at multiples of Width.
template <DataType D>
class Elements {
 public:
  using Storage = typename Element<D>::Storage;

  LLM_COMM_DEVICE Elements(const AddRmsNormArgs& args, const void* tensor)
      : first_(static_cast<Storage*>(const_cast<void*>(tensor))),
        spare_(args.comm.workspace[args.comm.rank]),
        is_aligned_(reinterpret_cast<uint64_t>(tensor) % sizeof(Line) == 0) {}

  // Changes with the addresses of load() and store() (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(first_) + is_aligned_; }

  // The load of the pack at `index`, if it is `wanted`.
  template <uint32_t Width>
  LLM_COMM_DEVICE PackLoad<D, Width> load_of(bool wanted, uint64_t index) const {
    return {first_ + index, wanted, is_aligned_, spare_};
  }
  template <uint32_t Width>
  LLM_COMM_DEVICE Pack<D, Width> load(uint64_t index) const {
    auto load = load_of<Width>(true, index);
    load.begin();
    return load.end();
  }

  template <uint32_t Width>
  LLM_COMM_DEVICE void store(uint64_t index, Pack<D, Width> pack) const {
    if (is_aligned_) {
      // By line: a struct of 16 bytes may be stored in parts.
      if constexpr (Width == kElementsPerLine) {
        store_line(first_ + index, __builtin_bit_cast(Line, pack));
      } else {
        *reinterpret_cast<Pack<D, Width>*>(first_ + index) = pack;
      }
      return;
    }
    for (uint32_t i = 0; i < Width; ++i) first_[index + i] = pack.element[i];
  }

  LLM_COMM_DEVICE LineLoad<D> load_of_line(bool wanted, uint64_t line) const {
    return load_of<kElementsPerLine>(wanted, line * kElementsPerLine);
  }
  LLM_COMM_DEVICE Line load_line(uint64_t line) const {
    return __builtin_bit_cast(Line, load<kElementsPerLine>(line * kElementsPerLine));
  }

 private:
  Storage* first_;
  const void* spare_;  // of at least a line
  bool is_aligned_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
