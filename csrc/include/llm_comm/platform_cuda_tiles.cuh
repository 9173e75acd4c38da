// CUDA definitions of the tile contract (tiles.cuh), with their inline PTX.
//
// Fetching uses TMA from sm_90 on, else cp.async. Multiplying uses wgmma in code for sm_90a, else mma.sync. Tiles have
// the layout that all of these accept, the 128-byte swizzle: 16-byte piece p of row r lies in position p ^ (r % 8).
// Accesses of eight rows then have no bank conflicts.
#pragma once

#include "llm_comm/data_type.h"
#include "llm_comm/matrix_view.h"
#include "llm_comm/platform_cuda.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define LLM_COMM_HAS_TMA 1
#else
#define LLM_COMM_HAS_TMA 0
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LLM_COMM_HAS_WGMMA 1
#else
#define LLM_COMM_HAS_WGMMA 0
#endif

namespace llm_comm::inline LLM_COMM_TARGET {

// Address in shared memory.
using SharedAddress = uint32_t;

// Tells the compiler that a value is the same in all lanes, so that branches on it do not diverge.
LLM_COMM_DEVICE uint32_t same_in_warp(uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

LLM_COMM_DEVICE void warp_sync() { __syncwarp(); }

LLM_COMM_DEVICE uint32_t largest_of_lanes(uint32_t value) { return __reduce_max_sync(0xFFFFFFFFu, value); }

// The shuffle keeps the compiler from recomputing the address at each use from special registers, which is slow.
LLM_COMM_DEVICE SharedAddress tile_memory() {
  const auto start = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory<char>()));
  return same_in_warp((start + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment);
}

template <class T>
LLM_COMM_DEVICE T* pointer_to(SharedAddress place) {
  return static_cast<T*>(__cvta_shared_to_generic(place));
}

// ---- Barriers ----------------------------------------------------------------------------------------------------

LLM_COMM_DEVICE void barrier_init(SharedAddress barrier, uint32_t arrivals) {
  if (thread_index() % kWarpThreads != 0) return;
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the TMA unit, for which block_sync() is not enough.
LLM_COMM_DEVICE void barrier_init_fence() {
#if LLM_COMM_HAS_TMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

LLM_COMM_DEVICE void barrier_arrive(SharedAddress barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

LLM_COMM_DEVICE void barrier_wait(SharedAddress barrier, uint32_t parity) {
  uint32_t is_over = 0;
  do {
#if LLM_COMM_HAS_TMA
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  } while (is_over == 0);
}

// ---- Fetching ----------------------------------------------------------------------------------------------------

// With TMA one thread arrives and announces the bytes. With cp.async each lane arrives after its own copies.
inline constexpr uint32_t kFetchArrivals = LLM_COMM_HAS_TMA ? 1 : kWarpThreads;
inline constexpr uint32_t kNumberArrivals = LLM_COMM_HAS_TMA ? kWarpThreads : 0;

LLM_COMM_DEVICE void fetch_begin(SharedAddress full, uint32_t bytes) {
#if LLM_COMM_HAS_TMA
  if (thread_index() % kWarpThreads != 0) return;
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(full), "r"(bytes)
               : "memory");
#endif
}

template <uint32_t Parts, bool OfMany = (Parts > 1)>
LLM_COMM_DEVICE void fetch_boxes(SharedAddress to, const MatrixView& matrix, uint32_t row, uint32_t box, uint32_t rows,
                                 uint32_t boxes, SharedAddress full, BoxUse use, uint32_t part = 0) {
#if LLM_COMM_HAS_TMA
  // Encodings of createpolicy for the whole access (CUTLASS, TMA::CacheHintSm90).
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;
  constexpr uint64_t kEvictNormal = 0x1000000000000000;
  if (thread_index() % kWarpThreads != 0) return;
  if constexpr (!OfMany) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],"
        " [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&matrix), "r"(0), "r"(row), "r"(box), "r"(full), "l"(use == BoxUse::kOnce ? kEvictFirst : kEvictNormal)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],"
        " [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&matrix), "r"(0), "r"(row), "r"(part), "r"(box), "r"(full),
        "l"(use == BoxUse::kOnce ? kEvictFirst : kEvictNormal)
        : "memory");
  }
#else
  constexpr uint32_t kPieces = kBoxRowBytes / sizeof(Line);
  for (uint32_t i = thread_index() % kWarpThreads; i < boxes * rows * kPieces; i += kWarpThreads) {
    const uint32_t row_of_boxes = i / kPieces;
    const uint32_t r = row_of_boxes % rows;
    const uint32_t piece = i % kPieces;
    const uint32_t byte = (box + row_of_boxes / rows) * kBoxRowBytes + piece * static_cast<uint32_t>(sizeof(Line));
    uint32_t row_of_part = row + r;
    uint64_t row_of_all = row_of_part;
    if constexpr (OfMany) {
      row_of_part = row + r % (rows / Parts);
      row_of_all = uint64_t{part + r / (rows / Parts)} * matrix.rows + row_of_part;
    }
    const bool is_there = row_of_part < matrix.rows && byte < matrix.row_bytes;
    const auto* const from =
        static_cast<const char*>(matrix.data) + (is_there ? row_of_all * matrix.row_bytes + byte : 0);
    const uint32_t place = to + row_of_boxes * kBoxRowBytes + (piece ^ r % 8) * static_cast<uint32_t>(sizeof(Line));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(is_there ? 16u : 0u)
                 : "memory");
  }
#endif
}

LLM_COMM_DEVICE void fetch_number(SharedAddress to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

template <bool Numbers = false>
LLM_COMM_DEVICE void fetch_end(SharedAddress full) {
  if constexpr (Numbers || !LLM_COMM_HAS_TMA) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
  }
}

// ---- Multiplying -------------------------------------------------------------------------------------------------

// Bytes of a row that one wgmma or mma.sync consumes, for every element type.
inline constexpr uint32_t kStepBytes = 32;

namespace tiles {

// mma.sync of 16 rows and 8 tokens. FP8 needs sm_89; the host launches no FP8 layer on older GPUs.
template <OperandType F>
LLM_COMM_DEVICE void multiply_fragments(float* sums, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define LLM_COMM_MMA(shape_and_types)                                                              \
  asm("mma.sync.aligned." shape_and_types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (F == OperandType::kFloat8) {
#if __CUDA_ARCH__ >= 890
    LLM_COMM_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
#else
    __trap();
#endif
  } else if constexpr (F == OperandType::kBFloat16) {
    LLM_COMM_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
    LLM_COMM_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  }
#undef LLM_COMM_MMA
}

}  // namespace tiles

#if LLM_COMM_HAS_WGMMA

// wgmma matrix descriptor: the address in units of 16 bytes, the distance between groups of eight rows, and the
// 128-byte swizzle. The leading dimension is unused with that swizzle.
struct Box {
  uint64_t descriptor;
};

LLM_COMM_DEVICE Box box_at(SharedAddress place) {
  constexpr uint64_t kEightRows = 8 * kBoxRowBytes;
  return {uint64_t{(place & 0x3FFFFu) >> 4} | uint64_t{1} << 16 | kEightRows >> 4 << 32 | uint64_t{1} << 62};
}

LLM_COMM_DEVICE Box moved(Box box, uint32_t bytes) { return {box.descriptor + (bytes >> 4)}; }

namespace tiles {

// FP8 operands are always K-major, so their instruction has no transpose flags.
#define LLM_COMM_WGMMA(count, registers, operands, ...)                                                    \
  if constexpr (F == OperandType::kFloat8) {                                                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #count "k32.f32.e4m3.e4m3 {" registers "}, " operands \
                 ", 1, 1, 1;"                                                                              \
                 : __VA_ARGS__                                                                             \
                 : "l"(outputs), "l"(tokens));                                                             \
  } else if constexpr (F == OperandType::kBFloat16) {                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #count "k16.f32.bf16.bf16 {" registers "}, " operands \
                 ", 1, 1, 1, 0, 0;"                                                                        \
                 : __VA_ARGS__                                                                             \
                 : "l"(outputs), "l"(tokens));                                                             \
  } else {                                                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #count "k16.f32.f16.f16 {" registers "}, " operands   \
                 ", 1, 1, 1, 0, 0;"                                                                        \
                 : __VA_ARGS__                                                                             \
                 : "l"(outputs), "l"(tokens));                                                             \
  }

// LLM_COMM_TEN: ten operand names in the instruction text. LLM_COMM_SUMS: eight accumulators as operands.
#define LLM_COMM_TEN(d) "%" #d "0,%" #d "1,%" #d "2,%" #d "3,%" #d "4,%" #d "5,%" #d "6,%" #d "7,%" #d "8,%" #d "9"
#define LLM_COMM_SUMS(i)                                                                                        \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define LLM_COMM_SUMS_32(i) LLM_COMM_SUMS(i), LLM_COMM_SUMS(i + 8), LLM_COMM_SUMS(i + 16), LLM_COMM_SUMS(i + 24)

// 64 outputs times 2 * N tokens over 32 bytes of columns.
template <OperandType F, uint32_t N>
LLM_COMM_DEVICE void wgmma(float (&sums)[N], uint64_t outputs, uint64_t tokens) {
  // clang-format off
  if constexpr (N == 4) {
    LLM_COMM_WGMMA(8, "%0,%1,%2,%3", "%4,%5",
                   "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]));
  } else if constexpr (N == 8) {
    LLM_COMM_WGMMA(16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9",
                   LLM_COMM_SUMS(0));
  } else if constexpr (N == 16) {
    LLM_COMM_WGMMA(32, LLM_COMM_TEN() ",%10,%11,%12,%13,%14,%15", "%16,%17",
                   LLM_COMM_SUMS(0), LLM_COMM_SUMS(8));
  } else if constexpr (N == 32) {
    LLM_COMM_WGMMA(64, LLM_COMM_TEN() "," LLM_COMM_TEN(1) "," LLM_COMM_TEN(2) ",%30,%31", "%32,%33",
                   LLM_COMM_SUMS_32(0));
  } else if constexpr (N == 64) {
    LLM_COMM_WGMMA(128, LLM_COMM_TEN() "," LLM_COMM_TEN(1) "," LLM_COMM_TEN(2) "," LLM_COMM_TEN(3) ","
                   LLM_COMM_TEN(4) "," LLM_COMM_TEN(5) ",%60,%61,%62,%63", "%64,%65",
                   LLM_COMM_SUMS_32(0), LLM_COMM_SUMS_32(32));
  } else {
    static_assert(N == 128);
    LLM_COMM_WGMMA(256, LLM_COMM_TEN() "," LLM_COMM_TEN(1) "," LLM_COMM_TEN(2) "," LLM_COMM_TEN(3) ","
                   LLM_COMM_TEN(4) "," LLM_COMM_TEN(5) "," LLM_COMM_TEN(6) "," LLM_COMM_TEN(7) "," LLM_COMM_TEN(8) ","
                   LLM_COMM_TEN(9) "," LLM_COMM_TEN(10) "," LLM_COMM_TEN(11)
                   ",%120,%121,%122,%123,%124,%125,%126,%127", "%128,%129",
                   LLM_COMM_SUMS_32(0), LLM_COMM_SUMS_32(32), LLM_COMM_SUMS_32(64), LLM_COMM_SUMS_32(96));
  }
  // clang-format on
}

#undef LLM_COMM_SUMS_32
#undef LLM_COMM_SUMS
#undef LLM_COMM_TEN
#undef LLM_COMM_WGMMA

}  // namespace tiles

// The fence serves groups without products: ptxas requires one, or inserts it with a warning.
LLM_COMM_DEVICE void multiply_end() {
  asm volatile("wgmma.fence.sync.aligned; wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <uint32_t Groups, uint32_t N>
LLM_COMM_DEVICE void multiply_wait(float (&sums)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
  if constexpr (Groups == 0) {
    LLM_COMM_UNROLL(128)
    for (uint32_t i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
  }
}

// The instruction computes 64 outputs. If the tile has fewer rows, the others are computed from the memory behind the
// tile and never read.
template <OperandType F, uint32_t N>
LLM_COMM_DEVICE void multiply_boxes(float (&sums)[N], Box outputs, uint32_t, Box tokens) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  LLM_COMM_UNROLL(4)
  for (uint32_t k = 0; k < kBoxRowBytes / kStepBytes; ++k) {
    tiles::wgmma<F>(sums, outputs.descriptor + 2 * k, tokens.descriptor + 2 * k);
  }
}

#else  // mma.sync

LLM_COMM_DEVICE void multiply_end() {}
template <uint32_t Groups, uint32_t N>
LLM_COMM_DEVICE void multiply_wait(float (&)[N]) {}

struct Box {
  SharedAddress place;
};

LLM_COMM_DEVICE Box box_at(SharedAddress place) { return {place}; }
LLM_COMM_DEVICE Box moved(Box box, uint32_t bytes) { return {box.place + bytes}; }

namespace tiles {

// Address of a 16-byte piece of a row, with the swizzle applied.
LLM_COMM_DEVICE uint32_t piece(Box box, uint32_t row, uint32_t piece_of_row) {
  return box.place + row * kBoxRowBytes + (piece_of_row ^ row % 8) * static_cast<uint32_t>(sizeof(Line));
}

}  // namespace tiles

// A warp computes 16 outputs. If only 8 rows of the tile are left, it computes them twice.
template <OperandType F, uint32_t N>
LLM_COMM_DEVICE void multiply_boxes(float (&sums)[N], Box outputs, uint32_t output_rows, Box tokens) {
  const uint32_t lane = thread_index() % kWarpThreads;
  const uint32_t first = thread_index() % kTeamThreads / kWarpThreads * 16;
  if (first >= output_rows) return;
  const uint32_t own = first + lane % 16;
  const uint32_t output = own < output_rows ? own : own - 8;
  LLM_COMM_UNROLL(4)
  for (uint32_t k = 0; k < kBoxRowBytes / kStepBytes; ++k) {
    uint32_t a[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(tiles::piece(outputs, output, 2 * k + lane / 16))
                 : "memory");
    LLM_COMM_UNROLL(32)
    for (uint32_t i = 0; i < N / 4; ++i) {
      uint32_t b[2];
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                   : "=r"(b[0]), "=r"(b[1])
                   : "r"(tiles::piece(tokens, 8 * i + lane % 8, 2 * k + lane / 8 % 2))
                   : "memory");
      tiles::multiply_fragments<F>(sums + 4 * i, a, b);
    }
  }
}

#endif  // LLM_COMM_HAS_WGMMA

// ---- Few tokens --------------------------------------------------------------------------------------------------
//
// Lane l has pieces l % 4 and l % 4 + 4 of 16 bytes of token l / 4, and multiplies them with the same pieces of two
// rows. So a lane reads whole pieces, and a step of mma.sync takes four columns of each of four pieces.

inline constexpr uint32_t kTokenColumns = 1;
LLM_COMM_DEVICE uint32_t token_column(uint32_t lane, uint32_t) { return lane / 4; }

// Lanes that read together have rows r and r + 4: the swizzle puts the same pieces of these into different banks.
LLM_COMM_DEVICE uint32_t row_of_sum(uint32_t lane, uint32_t i) {
  return lane / 8 % 4 + lane / 4 % 2 * 4 + i / 2 % 2 * 8;
}
inline constexpr uint32_t kLanesToNextRow = 8;

// A token has as many columns as the piece of a row, so of FP8 rows it has two lines.
template <OperandType W>
struct TokenPieces {
  static constexpr uint32_t kLines = 2 / operand_bytes(W);
  Line low[kLines], high[kLines];
};

template <OperandType W>
LLM_COMM_DEVICE TokenPieces<W> load_pieces(uint32_t lane, const char* from) {
  constexpr uint32_t kLines = TokenPieces<W>::kLines;
  const char* const piece = from + lane % 4 * (kLines * sizeof(Line));
  TokenPieces<W> pieces;
  LLM_COMM_UNROLL(2)
  for (uint32_t i = 0; i < kLines; ++i) {
    pieces.low[i] = load_line(piece + i * sizeof(Line));
    pieces.high[i] = load_line(piece + (4 * kLines + i) * sizeof(Line));
  }
  return pieces;
}

struct RowPieces {
  // Rows row_of_sum(lane, 0) and row_of_sum(lane, 2). Their pieces are like those of tokens.
  TokenPieces<OperandType::kBFloat16> upper, lower;
};

LLM_COMM_DEVICE RowPieces load_row_pieces(uint32_t lane, const char* from, uint32_t row_bytes, uint32_t rows) {
  const auto load = [&](uint32_t row) {
    return load_pieces<OperandType::kBFloat16>(lane, from + uint64_t{row < rows ? row : rows - 1} * row_bytes);
  };
  return {load(row_of_sum(lane, 0)), load(row_of_sum(lane, 2))};
}

namespace tiles {

// Two FP8 values in the type of the tokens. The host launches no kernel with them on GPUs before sm_89.
template <OperandType F>
LLM_COMM_DEVICE uint32_t from_e4m3(uint32_t bits) {
#if __CUDA_ARCH__ >= 890
  const uint32_t halves = e4m3_to_fp16(static_cast<uint16_t>(bits));
  if constexpr (F == OperandType::kFloat16) return halves;
  return floats_to_bf16(fp16_to_float(static_cast<uint16_t>(halves)),
                        fp16_to_float(static_cast<uint16_t>(halves >> 16)));
#else
  __trap();
  return bits;
#endif
}

// Half `half` of a tile, by pieces of two rows and of N times 8 tokens.
template <OperandType F, OperandType W, uint32_t N>
LLM_COMM_DEVICE void multiply_half(float (&sums)[N][2][4], const Line& upper, const Line& lower,
                                   const TokenPieces<W> (&tokens)[N][kTokenColumns], uint32_t half) {
  constexpr uint32_t kSteps = 2 * TokenPieces<W>::kLines;
  LLM_COMM_UNROLL(4)
  for (uint32_t i = 0; i < kSteps; ++i) {
    uint32_t a[4];
    if constexpr (W == OperandType::kFloat8) {
      a[0] = from_e4m3<F>(upper.word[i]);
      a[1] = from_e4m3<F>(lower.word[i]);
      a[2] = from_e4m3<F>(upper.word[i] >> 16);
      a[3] = from_e4m3<F>(lower.word[i] >> 16);
    } else {
      a[0] = upper.word[2 * i];
      a[1] = lower.word[2 * i];
      a[2] = upper.word[2 * i + 1];
      a[3] = lower.word[2 * i + 1];
    }
    LLM_COMM_UNROLL(4)
    for (uint32_t n = 0; n < N; ++n) {
      const Line& x = half == 0 ? tokens[n][0].low[i / 2] : tokens[n][0].high[i / 2];
      const uint32_t b[2] = {x.word[i % 2 * 2], x.word[i % 2 * 2 + 1]};
      multiply_fragments<F>(sums[n][half], a, b);
    }
  }
}

}  // namespace tiles

template <OperandType F>
LLM_COMM_DEVICE void multiply_rows(float (&sums)[1][2][4], const RowPieces& rows,
                                   const TokenPieces<F> (&tokens)[1][kTokenColumns]) {
  tiles::multiply_half<F, F>(sums, rows.upper.low[0], rows.lower.low[0], tokens, 0);
  tiles::multiply_half<F, F>(sums, rows.upper.high[0], rows.lower.high[0], tokens, 1);
}

template <OperandType F, OperandType W, uint32_t N>
LLM_COMM_DEVICE void multiply_rows(float (&sums)[N][2][4], SharedAddress place,
                                   const TokenPieces<W> (&tokens)[N][kTokenColumns]) {
  const uint32_t lane = thread_index() % kWarpThreads;
  const uint32_t row = row_of_sum(lane, 0);
  const SharedAddress low = place + row * kBoxRowBytes + (lane % 4 ^ row) * static_cast<uint32_t>(sizeof(Line));
  const auto line_at = [](SharedAddress from) {
    Line line;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(line.word[0]), "=r"(line.word[1]), "=r"(line.word[2]), "=r"(line.word[3])
                 : "r"(from)
                 : "memory");
    return line;
  };
  LLM_COMM_UNROLL(2)
  for (uint32_t half = 0; half < 2; ++half) {
    const SharedAddress from = low ^ half * (kBoxRowBytes / 2);  // 4 pieces further
    const Line upper = line_at(from);
    const Line lower = line_at(from + 8 * kBoxRowBytes);
    tiles::multiply_half<F, W>(sums, upper, lower, tokens, half);
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
