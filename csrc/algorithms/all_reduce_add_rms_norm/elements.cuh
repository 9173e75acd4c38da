// Access to the caller's tensors in packs of adjacent elements. Used by the fused all-reduce + RMSNorm kernels.
#pragma once

#include "algorithms/all_reduce_add_rms_norm/operation.cuh"
#include "algorithms/line_elements.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

template <DataType D>
LLM_COMM_DEVICE Pack<D, kElementsPerLine> as_pack(Line line) {
  return __builtin_bit_cast(Pack<D, kElementsPerLine>, line);
}

// Load of `Width` adjacent elements in steps, so that other loads can be in flight before its values are needed.
// Construct it before grid_dependency_wait(). begin() loads unconditionally, from `spare` memory if nothing is wanted:
// a conditional load would first have to clear its registers.
template <DataType D, uint32_t Width>
class PackLoad {
 public:
  using Storage = typename Element<D>::Storage;

  LLM_COMM_DEVICE PackLoad(const Storage* first, bool wanted, bool is_aligned, const void* spare)
      : first_(first), address_(wanted && is_aligned ? first : spare), later_(wanted && !is_aligned) {}

  // Depends on everything that begin() needs (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(address_); }

  LLM_COMM_DEVICE void begin() { load_words(address_, words_.word); }

  // Returns the values; unspecified unless wanted. An unaligned tensor is loaded only here, element by element. The
  // values stay in words, so that those of an aligned tensor are not unpacked before their use.
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

// A caller's tensor, accessed in packs of `Width` elements that start at multiples of `Width`.
template <DataType D>
class Elements {
 public:
  using Storage = typename Element<D>::Storage;
  static constexpr bool kHoldsWords = false;

  LLM_COMM_DEVICE Elements(const AddRmsNormArgs& args, const void* tensor)
      : first_(static_cast<Storage*>(const_cast<void*>(tensor))),
        spare_(args.comm.workspace[args.comm.rank]),
        is_aligned_(reinterpret_cast<uint64_t>(tensor) % sizeof(Line) == 0) {}

  // Depends on the addresses of load() and store() (for grid_dependency_wait_after).
  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(first_) + is_aligned_; }

  // Load of the pack at `index`, if `wanted`.
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
      // Uses store_line because the compiler may split the store of a 16-byte struct.
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
  const void* spare_;  // at least one line
  bool is_aligned_;
};

// Elements, for kernels that hold many lines at a time. Unaligned tensors are accessed by calls, since their code behind
// each access would make the compiler spill registers. A load begins at once.
template <DataType D>
class ElementLines {
 public:
  using Storage = typename Element<D>::Storage;
  static constexpr bool kHoldsWords = true;  // values are kept in words of two elements
  using Values = Pack<D, kElementsPerLine>;

  LLM_COMM_DEVICE ElementLines(const AddRmsNormArgs&, const void* tensor)
      : first_(static_cast<Storage*>(const_cast<void*>(tensor))),
        is_aligned_(reinterpret_cast<uint64_t>(tensor) % sizeof(Line) == 0) {}

  LLM_COMM_DEVICE uint64_t precomputed() const { return reinterpret_cast<uint64_t>(first_) + is_aligned_; }

  LLM_COMM_DEVICE bool is_aligned() const { return is_aligned_; }
  // Tells the compiler that the tensor is aligned.
  LLM_COMM_DEVICE void assume_aligned() { is_aligned_ = true; }
  // Calls run(tensor), compiled for both cases.
  template <class Run>
  LLM_COMM_DEVICE void visit(Run run) const {
    ElementLines tensor = *this;
    if (!is_aligned_) {
      run(tensor);
      return;
    }
    tensor.assume_aligned();
    run(tensor);
  }

  class Load {
   public:
    LLM_COMM_DEVICE Load(const ElementLines& tensor, bool wanted, uint64_t index)
        : tensor_(tensor), wanted_(wanted), index_(index) {}
    LLM_COMM_DEVICE void begin() {
      if (wanted_) line_ = tensor_.load_line(index_ / kElementsPerLine);
    }
    LLM_COMM_DEVICE Values end() const { return as_pack<D>(line_); }

   private:
    const ElementLines& tensor_;
    bool wanted_;
    uint64_t index_;
    Line line_{};
  };

  template <uint32_t Width>
  LLM_COMM_DEVICE Load load_of(bool wanted, uint64_t index) const {
    return {*this, wanted, index};
  }
  template <uint32_t Width>
  LLM_COMM_DEVICE Values load(uint64_t index) const {
    return as_pack<D>(load_line(index / kElementsPerLine));
  }
  template <uint32_t Width>
  LLM_COMM_DEVICE void store(uint64_t index, Values values) const {
    const Line line = __builtin_bit_cast(Line, values);
    if (is_aligned_) {
      store_line(first_ + index, line);
    } else {
      store_elements<D>(first_ + index, kElementsPerLine, line);
    }
  }

  LLM_COMM_DEVICE Line load_line(uint64_t line) const {
    const Storage* const from = first_ + line * kElementsPerLine;
    return is_aligned_ ? llm_comm::load_line(from) : load_elements<D>(from, kElementsPerLine);
  }

 private:
  Storage* first_;
  bool is_aligned_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
