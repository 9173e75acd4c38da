// Parameters of every fused kernel (all-reduce, residual add, RMSNorm), and how a row is spread over threads.
//
// A row of `row_lines` lines belongs to a cluster: its blocks take one tile of `tile_lines` lines for each peer at a time,
// block m the m-th of every `cluster_blocks` tiles. Rows go to clusters in turn. Threads (k, c) of a block are those of
// the plain kernels (kernels/all_reduce/args.cuh); a block is rounded up to whole warps, whose last threads have no line.
#pragma once

#include "llm_comm/device_comm.cuh"
#include "llm_comm/reduce.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Threads of a block. What needs more registers has fewer: two-shot, and blocks that walk over several tiles.
inline constexpr uint32_t kMaxFusedThreads = 1024;
inline constexpr uint32_t kMaxTwoShotThreads = 512;
inline constexpr uint32_t kMaxLoopThreads = 512;
inline constexpr uint32_t kMaxClusterBlocks = 16;  // 8 on every GPU with clusters, 16 where the device permits it
inline constexpr uint32_t kMaxHidden = 16384;
// Squares are summed in chunks of this many lines, in an order that only `row_lines` determines, so that a row's norm does
// not depend on the kernel, the grid or the rows beside it. Tiles and segments are whole chunks.
inline constexpr uint32_t kChunkLines = 8;
inline constexpr uint32_t kElementsPerLine = 8;  // of bf16 and fp16, the types of these kernels
inline constexpr uint32_t kMaxChunks = kMaxHidden / (kChunkLines * kElementsPerLine);

// Of the normed rows. kStatic: e4m3(normed / *scale); kDynamic: scale[row] = max(|normed row|) / 448, at least
// 1 / (448 * 512), and e4m3(normed / scale[row]); both from the values that kNone would return, rounded to their type.
enum class Quantization : uint32_t { kNone = 0, kStatic = 1, kDynamic = 2 };

struct AddRmsNormArgs {
  DeviceComm comm;
  const void* input;     // [rows, row_lines * 8]; this and all other tensors: element-aligned, rows contiguous
  const void* residual;  // like the input; nullptr for none
  const void* weight;    // [row_lines * 8]
  void* normed;          // like the input (may be it), or FP8
  void* new_residual;    // like the input (may be the residual): the sum plus the residual
  float* scale;          // Quantization
  uint32_t rows;         // at least 1, the same on all ranks, as are row_lines and tile_lines
  uint32_t row_lines;
  uint32_t segment_lines;  // two-shot: of a row, that one rank owns; a multiple of kChunkLines
  uint32_t tile_lines;     // a multiple of kChunkLines
  uint32_t cluster_blocks;
  uint32_t depth;  // tiles that a block sends ahead of the one it reduces
  Quantization quantization;
  float epsilon;
  float reciprocal_hidden;
};

// Thread (k, c), and the rows of its cluster.
struct RowThread {
  uint32_t peer;
  uint32_t column;
  bool has_line;
  uint32_t member;   // of the cluster, this block
  uint32_t cluster;  // its number in the grid
  uint32_t clusters;

  template <int World>
  static LLM_COMM_DEVICE RowThread of(const AddRmsNormArgs& args) {
    RowThread self;
    // A division would take longer, and lies where nothing else is under way if this grid does not overlap the last one.
    self.peer = 0;
    LLM_COMM_UNROLL(8)
    for (uint32_t k = 1; k < World; ++k) self.peer += thread_index() >= k * args.tile_lines;
    self.column = thread_index() - self.peer * args.tile_lines;
    self.has_line = self.column < args.tile_lines;
    self.cluster = cluster_index();
    self.member = cluster_block_rank();
    self.clusters = block_count() / args.cluster_blocks;
    return self;
  }
};

// The tiles of a block in their order: all of its first row, all of its next row, ...
struct TileCursor {
  uint32_t row;
  uint32_t first;  // line of the row (two-shot: of the segment) at which this round of the cluster begins

  LLM_COMM_DEVICE bool is_last_of_row(uint32_t span, uint32_t round_lines) const { return first + round_lines >= span; }

  // `span`: lines that the tiles of a row cover; `round_lines`: those of one tile of each block of the cluster.
  LLM_COMM_DEVICE void advance(uint32_t span, uint32_t round_lines, uint32_t clusters) {
    first += round_lines;
    if (first < span) return;
    first = 0;
    row += clusters;
  }
};

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
  LLM_COMM_DEVICE uint64_t fingerprint() const { return reinterpret_cast<uint64_t>(address_); }

  LLM_COMM_DEVICE void begin() { load_words(address_, words_.word); }

  // The values, or whatever, if they are not wanted. What is not aligned is loaded only now, element by element. By words:
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
  LLM_COMM_DEVICE uint64_t fingerprint() const { return reinterpret_cast<uint64_t>(first_) + is_aligned_; }

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
