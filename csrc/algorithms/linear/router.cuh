// Kernel of a router: the logits of few tokens, and the experts that each token gets (router.h).
//
// Shape. One cluster. Its blocks share the columns, so each byte of the weight is read by one block. A warp multiplies 16
// experts with all tokens over its part of the columns, and leaves the sums in shared memory. Then the blocks share the
// tokens. A warp adds up the parts of its token from the memory of all blocks, and chooses the token's experts. A block
// ends when the others have read its sums.
//
// Early start. The weight is read before earlier grids of the stream have ended; x is not.
//
// Order of additions. A warp adds the left and the right halves of its tiles in two sums, in ascending order, and then
// these two. The sums of the parts are added in ascending order, then the bias. Parts depend on the layer and on whether
// the device has clusters. So the bits of a token do not depend on other tokens.
//
// Choice. A logit and its expert's number make a key, so that the largest key is the next expert. Logits have 16 bits
// and numbers fewer, so a key fits in a word, which the lanes of a warp compare by one instruction.
#pragma once

#include "algorithms/linear/router_args.h"
#include "llm_comm/reduce.cuh"
#include "llm_comm/tiles.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Key of an expert with a logit of these bits. Keys ascend with the logit, and of equal ones descend with the expert.
// No key is 0.
struct RouterKey {
  uint32_t key;

  LLM_COMM_DEVICE explicit RouterKey(uint32_t word) : key(word) {}
  LLM_COMM_DEVICE RouterKey(uint16_t bits, uint32_t expert) {
    const uint32_t value = bits == 0x8000 ? 0 : bits;  // both zeros are equal
    const uint32_t ascending = (value & 0x8000) != 0 ? ~value & 0xFFFF : value | 0x8000;
    key = ascending << 16 | (0xFFFF - expert);
  }
  LLM_COMM_DEVICE uint32_t expert() const { return 0xFFFF - (key & 0xFFFF); }
  LLM_COMM_DEVICE uint16_t bits() const {
    const uint32_t ascending = key >> 16;
    return static_cast<uint16_t>((ascending & 0x8000) != 0 ? ascending & 0x7FFF : ~ascending);
  }
};

LLM_COMM_DEVICE float sum_of_lanes(float value) {
  LLM_COMM_UNROLL(5)
  for (uint32_t mask = 1; mask < kWarpThreads; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

// Keys of a lane's experts of a token: experts lane, lane + 32, and so on; 0 for those that there are not.
using RouterKeys = uint32_t[router::kMaxExperts / kWarpThreads];

// Adds up the sums of all parts, [part of a block][token][expert] in the shared memory of each block, and writes the
// logits of `token`. Called by all lanes of a warp.
template <DataType D>
LLM_COMM_DEVICE void add_parts(const RouterArgs& args, uint32_t token, const float* sums, RouterKeys& keys) {
  using E = Element<D>;
  // Loads from other blocks take long: this many experts of this many parts are loaded at once.
  constexpr uint32_t kExperts = 4, kParts = router::kClusterBlocks;
  const uint32_t lane = thread_index() % kWarpThreads;
  const uint32_t parts = args.division.blocks * args.division.block_parts;
  const uint32_t block_parts_log2 = count_bits(args.division.block_parts - 1);
  LLM_COMM_UNROLL(4)
  for (uint32_t begin = 0; begin < router::kMaxExperts / kWarpThreads; begin += kExperts) {
    float logits[kExperts] = {};
    LLM_COMM_UNROLL(1)
    for (uint32_t first = 0; begin * kWarpThreads < args.experts && first < parts; first += kParts) {
      float of_part[kParts][kExperts];
      LLM_COMM_UNROLL(8)
      for (uint32_t k = 0; k < kParts; ++k) {
        const uint32_t wanted = first + k < parts ? first + k : parts - 1;
        const uint32_t of_block = wanted & (args.division.block_parts - 1);
        LLM_COMM_UNROLL(4)
        for (uint32_t i = 0; i < kExperts; ++i) {
          const uint32_t number = lane + (begin + i) * kWarpThreads;
          const uint32_t expert = number < args.experts ? number : args.experts - 1;
          of_part[k][i] = load_of_block(sums + (of_block * args.tokens + token) * args.experts + expert,
                                        wanted >> block_parts_log2);
        }
      }
      LLM_COMM_UNROLL(8)
      for (uint32_t k = 0; k < kParts; ++k) {
        LLM_COMM_UNROLL(4)
        for (uint32_t i = 0; i < kExperts; ++i) {
          if (first + k < parts) logits[i] += of_part[k][i];
        }
      }
    }
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < kExperts; ++i) {
      const uint32_t expert = lane + (begin + i) * kWarpThreads;
      keys[begin + i] = 0;
      if (expert >= args.experts) continue;
      if (args.bias != nullptr) logits[i] += E::value(args.bias[expert]);
      const uint16_t bits = E::round(logits[i]);
      args.logits[uint64_t{token} * args.experts + expert] = bits;
      keys[begin + i] = RouterKey(bits, expert).key;
    }
  }
}

LLM_COMM_DEVICE uint32_t largest_key(const RouterKeys& keys) {
  uint32_t most = 0;
  LLM_COMM_UNROLL(16)
  for (uint32_t i = 0; i < router::kMaxExperts / kWarpThreads; ++i) most = keys[i] > most ? keys[i] : most;
  return largest_of_lanes(most);
}

// Writes the experts of `token` and their weights. Called by all lanes of a warp.
template <DataType D>
LLM_COMM_DEVICE void choose_experts(const RouterArgs& args, uint32_t token, RouterKeys& keys) {
  const uint32_t lane = thread_index() % kWarpThreads;
  const auto value_of = [](uint32_t key) { return Element<D>::value(RouterKey(key).bits()); };
  uint32_t next = largest_key(keys);
  const float largest = value_of(next);
  float total = 0.0f;
  LLM_COMM_UNROLL(16)
  for (uint32_t i = 0; i < router::kMaxExperts / kWarpThreads; ++i) {
    if (!args.renormalize && keys[i] != 0) total += exponential(value_of(keys[i]) - largest);
  }
  uint32_t own = 0;  // lane k has the k-th expert
  LLM_COMM_UNROLL(1)
  for (uint32_t k = 0; k < args.top_k; ++k) {
    if (lane == k) own = next;
    LLM_COMM_UNROLL(16)
    for (uint32_t i = 0; i < router::kMaxExperts / kWarpThreads; ++i) keys[i] = keys[i] == next ? 0 : keys[i];
    next = largest_key(keys);
  }
  const float share = own != 0 ? exponential(value_of(own) - largest) : 0.0f;
  total = sum_of_lanes(args.renormalize ? share : total);
  if (lane >= args.top_k) return;
  const uint32_t place = token * args.top_k + lane;
  store_plain(args.weights + place, float_to_bits(share / total));
  store_plain(args.ids + place, RouterKey(own).expert());
}

template <OperandType F, DataType D, uint32_t Rows>
LLM_COMM_KERNEL(router::kThreads)
route_tokens(LLM_COMM_KERNEL_PARAM RouterArgs args) {
  constexpr uint32_t kBoxes = 4;  // whose weights a lane holds at once
  const uint32_t warp = same_in_warp(thread_index() / kWarpThreads);
  const uint32_t lane = thread_index() % kWarpThreads;
  const router::Division& division = args.division;
  float* const sums = shared_memory<float>();  // [part of the block][token][expert]
  const uint32_t tiles = divide_up(args.experts, router::kTileRows);
  const uint32_t part_of_block = division.block_parts == 1 ? 0 : warp / tiles;
  const uint32_t part = cluster_block_rank() * division.block_parts + part_of_block;
  const uint32_t boxes = args.row_bytes / kBoxRowBytes;
  const uint32_t first_box = part * division.part_boxes;
  const uint32_t end_box = first_box + division.part_boxes < boxes ? first_box + division.part_boxes : boxes;
  RowPieces weights[kBoxes];
  const auto load_weights = [&](uint32_t tile, uint32_t box) {
    const char* const from = args.weight + uint64_t{tile} * router::kTileRows * args.row_bytes;
    LLM_COMM_UNROLL(4)
    for (uint32_t i = 0; i < kBoxes; ++i) {
      if (box + i >= end_box) continue;
      weights[i] = load_row_pieces(lane, from + uint64_t{box + i} * kBoxRowBytes, args.row_bytes,
                                   args.experts - tile * router::kTileRows);
    }
  };
  const uint32_t first_tile = division.block_parts == 1 ? warp : warp % tiles;
  const uint32_t end_tile = part_of_block < division.block_parts ? tiles : 0;
  if (first_tile < end_tile) load_weights(first_tile, first_box);
  grid_dependency_wait();  // for x, and for who reads what the results hold
  grid_dependency_trigger();

  LLM_COMM_UNROLL(1)
  for (uint32_t tile = first_tile; tile < end_tile; tile += router::kWarps) {
    float products[Rows / 8][1][2][4] = {};
    LLM_COMM_UNROLL(1)
    for (uint32_t box = first_box; box < end_box; box += kBoxes) {
      if (tile != first_tile || box != first_box) load_weights(tile, box);
      LLM_COMM_UNROLL(8)
      for (uint32_t n = 0; n < Rows / 8; ++n) {
        TokenPieces<F> pieces[kBoxes][1][kTokenColumns];
        LLM_COMM_UNROLL(4)
        for (uint32_t i = 0; i < kBoxes; ++i) {
          LLM_COMM_UNROLL(2)
          for (uint32_t c = 0; c < kTokenColumns; ++c) {
            // Sums of tokens that are not there are dropped. They are those of the last token.
            const uint32_t wanted = 8 * n + token_column(lane, c);
            const uint32_t token = wanted < args.tokens ? wanted : args.tokens - 1;
            if (box + i >= end_box) continue;
            pieces[i][0][c] =
                load_pieces<F>(lane, args.x + uint64_t{token} * args.row_bytes + (box + i) * kBoxRowBytes);
          }
        }
        LLM_COMM_UNROLL(4)
        for (uint32_t i = 0; i < kBoxes; ++i) {
          if (box + i < end_box) multiply_rows<F>(products[n], weights[i], pieces[i]);
        }
      }
    }
    LLM_COMM_UNROLL(8)
    for (uint32_t n = 0; n < Rows / 8; ++n) {
      LLM_COMM_UNROLL(4)
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t token = 8 * n + token_of(lane, i);
        const uint32_t expert = tile * router::kTileRows + row_of_sum(lane, i);
        if (token >= args.tokens || expert >= args.experts) continue;
        sums[(part_of_block * args.tokens + token) * args.experts + expert] =
            products[n][0][0][i] + products[n][0][1][i];
      }
    }
  }
  cluster_arrive();
  cluster_wait();
  if (division.blocks == 1) block_sync();

  const uint32_t first_token = cluster_block_rank() * args.block_tokens;
  const uint32_t tokens = args.tokens < first_token + args.block_tokens ? args.tokens : first_token + args.block_tokens;
  RouterKeys keys;
  uint32_t token = first_token + warp;
  if (token < tokens) add_parts<D>(args, token, sums, keys);
  cluster_arrive();  // what other blocks have in shared memory has been read
  LLM_COMM_UNROLL(1)
  while (token < tokens) {
    choose_experts<D>(args, token, keys);
    token += router::kWarps;
    // Only where a block is alone: in a cluster a warp has one token at most.
    if (token < tokens) add_parts<D>(args, token, sums, keys);
  }
  cluster_wait();
}

template <OperandType F, DataType D>
RouterKernel RouterKernels<F, D>::find(uint32_t tokens) {
  if (tokens <= 8) return &route_tokens<F, D, 8>;
  if (tokens <= 16) return &route_tokens<F, D, 16>;
  return tokens <= 32 ? &route_tokens<F, D, 32> : &route_tokens<F, D, 64>;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET
