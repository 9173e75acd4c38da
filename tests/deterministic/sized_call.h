// An all-to-all of unequal parts of a schedule. The sizes lie in memory of the device.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithms/all_to_all_v/operation.cuh"
#include "calls.h"
#include "operands.h"
#include "tilings.h"

namespace drill {

class SizedCall final : public Call {
 public:
  SizedCall(uint32_t algorithm, uint32_t ranks, Random& random)
      : algorithm_(algorithm),
        row_bytes_(random.chance(96) ? sizeof(Line) : random.between(1, 40)),
        max_rows_(random.between(1, std::max(1u, (ranks > 4 ? 64 : 128) / row_bytes_))),
        has_int32_(random.chance(128)),
        comes_late_(random.chance(128)),
        problem_{uint64_t{row_bytes_} * max_rows_,
                 0,
                 DataType::kByte,
                 ranks,
                 {static_cast<double>(row_bytes_), has_int32_ ? 1.0 : 0.0}},
        tiling_(draw_tiling(algorithm, problem_, random)),
        rows_(ranks, std::vector<uint32_t>(ranks)) {
    for (std::vector<uint32_t>& of_sender : rows_) {
      for (uint32_t& rows : of_sender) rows = random.chance(64) ? 0 : random.below(max_rows_ + 1);
    }
    if (random.chance(4)) wrong_ = {random.below(ranks), random.below(ranks), random.chance(96)};
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<uint32_t> sent = rows_[rank];
      std::vector<uint32_t> received;
      for (uint32_t sender = 0; sender < ranks; ++sender) received.push_back(rows_[sender][rank]);
      if (wrong_ && wrong_->is_too_large && rank == wrong_->sender) sent[wrong_->receiver] = max_rows_ + 1;
      if (wrong_ && !wrong_->is_too_large && rank == wrong_->receiver) {
        uint32_t& rows = received[wrong_->sender];
        rows = rows == 0 ? 1 : random.below(rows);
      }
      send_sizes_.push_back(written(sent));
      recv_sizes_.push_back(written(received));
      inputs_.emplace_back(DataType::kByte, uint64_t{row_bytes_} * (sum(rows_[rank]) + random.below(2)), random);
      inputs_.back().fill(random);
      output_rows_.push_back(sum(received) + random.below(3));
      outputs_.emplace_back(DataType::kByte, uint64_t{row_bytes_} * output_rows_.back(), random);
    }
  }

  void enqueue(World& world, uint32_t rank) override {
    Sizes& sizes = sizes_[rank];
    sizes.send = comes_late_ ? std::vector<uint64_t>(send_sizes_[rank].size()) : send_sizes_[rank];
    sizes.recv = comes_late_ ? std::vector<uint64_t>(recv_sizes_[rank].size()) : recv_sizes_[rank];
    if (comes_late_) {  // a grid before writes them, as a router of experts does
      world.launch(rank, {1, 1, 0}, [this, rank, &sizes] {
        grid_dependency_wait();
        std::copy(send_sizes_[rank].begin(), send_sizes_[rank].end(), sizes.send.begin());
        std::copy(recv_sizes_[rank].begin(), recv_sizes_[rank].end(), sizes.recv.begin());
      });
    }
    calls_.push_back(world.core(rank).prepare(algorithm_, problem_, tiling_));
    const uint64_t input = inputs_[rank].address();
    const uint64_t output = outputs_[rank].address();
    const uint64_t buffers[] = {input,
                                output,
                                reinterpret_cast<uint64_t>(sizes.send.data()),
                                reinterpret_cast<uint64_t>(sizes.recv.data()),
                                input + inputs_[rank].bytes_in_all(),
                                output + outputs_[rank].bytes_in_all()};
    calls_.back()->run(buffers, 0);
  }

  std::string wrong(uint32_t rank) const override {
    std::vector<uint32_t> expected;
    for (uint32_t sender = 0; sender < problem_.world; ++sender) {
      uint64_t first = 0;
      for (uint32_t before = 0; before < rank; ++before) first += rows_[sender][before];
      for (uint64_t i = 0; i < uint64_t{row_bytes_} * rows_[sender][rank]; ++i) {
        expected.push_back(inputs_[sender].at(row_bytes_ * first + i));
      }
    }
    expected.resize(uint64_t{row_bytes_} * output_rows_[rank], static_cast<uint8_t>(kUntouched));
    return outputs_[rank].differs_from(expected);
  }
  std::string touched(uint32_t rank) const override { return outputs_[rank].touched(); }

  // Of a pair that disagrees both; of a size that no part may have, all.
  bool must_fail(uint32_t rank) const override {
    return wrong_ && (wrong_->is_too_large || rank == wrong_->sender || rank == wrong_->receiver);
  }

  uint64_t operations() const override { return launches(problem_, tiling_); }

  std::string name() const override {
    std::string rows;
    for (const std::vector<uint32_t>& of_sender : rows_) {
      for (const uint32_t of_receiver : of_sender) rows += " " + std::to_string(of_receiver);
      rows += ",";
    }
    return name_of(algorithm_) + " of up to " + std::to_string(max_rows_) + " rows of " + std::to_string(row_bytes_) +
           " bytes (" + (has_int32_ ? "int32" : "int64") + (comes_late_ ? ", written before," : ",") + rows + " " +
           text(tiling_) +
           (wrong_ ? ", wrong from " + std::to_string(wrong_->sender) + " to " + std::to_string(wrong_->receiver) +
                         (wrong_->is_too_large ? ", too large)" : ")")
                   : ")");
  }

 private:
  // A size that is wrong: that of the sender is larger than any may be, or that of the receiver is another one.
  struct Wrong {
    uint32_t sender;
    uint32_t receiver;
    bool is_too_large;
  };
  struct Sizes {
    std::vector<uint64_t> send;
    std::vector<uint64_t> recv;
  };

  static uint32_t sum(const std::vector<uint32_t>& rows) {
    uint32_t total = 0;
    for (const uint32_t one : rows) total += one;
    return total;
  }

  // Sizes as the kernels read them.
  std::vector<uint64_t> written(const std::vector<uint32_t>& rows) const {
    if (!has_int32_) return {rows.begin(), rows.end()};
    std::vector<uint64_t> pairs(divide_up(rows.size(), size_t{2}));
    std::memcpy(pairs.data(), rows.data(), rows.size() * sizeof(rows[0]));
    return pairs;
  }

  uint32_t algorithm_;
  uint32_t row_bytes_;
  uint32_t max_rows_;
  bool has_int32_;
  bool comes_late_;
  Problem problem_;
  Tiling tiling_;
  std::optional<Wrong> wrong_;
  std::vector<std::vector<uint32_t>> rows_;        // [sender][receiver]
  std::vector<std::vector<uint64_t>> send_sizes_;  // by rank, as what follows
  std::vector<std::vector<uint64_t>> recv_sizes_;
  std::vector<Tensor> inputs_;
  std::vector<uint64_t> output_rows_;
  std::vector<Tensor> outputs_;
  Sizes sizes_[kMaxWorldSize];  // in memory of the device
  std::vector<std::unique_ptr<host::PreparedCall>> calls_;
};

}  // namespace drill
