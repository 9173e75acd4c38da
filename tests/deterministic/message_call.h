// Messages between all pairs of ranks, by channels.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "calls.h"
#include "message_passing.cuh"

namespace drill {

inline Line draw_line(Random& random) {
  Line line;
  for (uint32_t& word : line.word) word = static_cast<uint32_t>(random.next());
  return line;
}

inline bool differ(const Line& a, const Line& b) { return std::memcmp(&a, &b, sizeof(Line)) != 0; }

class MessageCall final : public Call {
 public:
  MessageCall(Form form, uint32_t index, uint32_t ranks, Random& random)
      : form_(form),
        ranks_(ranks),
        lines_(random.between(1, ranks > 4 ? 3 : kChannelLines)),
        // Every request to a proxy is a release, which the model of memory takes long for.
        rounds_(random.between(1, form == Form::kPort && ranks > 4 ? 1 : 3)),
        threads_(random.between(1, 4)),
        first_flag_(0x7FFFFFF0u + 4 * index),
        words_(ranks * ranks * rounds_) {
    for (uint32_t i = 0; i < ranks * ranks * rounds_ * lines_; ++i) source_.push_back(draw_line(random));
    received_.resize(source_.size());
  }

  void enqueue(World& world, uint32_t rank) override {
    MessageArgs args{};
    args.comm = world.device_comm(rank);
    args.channel_offset = kChannelOffset;
    args.counters = world.channel_counters(rank);
    args.source = source_.data() + at(rank, 0, 0, 0);
    args.received = received_.data() + at(rank, 0, 0, 0);
    args.words = words_.data() + rank * ranks_ * rounds_;
    args.lines = lines_;
    args.rounds = rounds_;
    args.first_flag = first_flag_;
    void (*const kernels[])(MessageArgs) = {&pass_by_put, &pass_by_get, &pass_by_packets, &pass_by_port};
    if (form_ == Form::kPort) world.start_ports(rank);
    const auto kernel = kernels[static_cast<uint32_t>(form_)];
    const emulator::LaunchConfig config{ranks_ - 1, threads_, sizeof(Line)};
    args.comm.takes_tickets = world.machine().resident_blocks(config) < config.blocks;
    world.launch(rank, config, [=] { kernel(args); });
  }

  std::string wrong(uint32_t rank) const override {
    for (uint32_t peer = 0; peer < ranks_; ++peer) {
      for (uint32_t round = 0; peer != rank && round < rounds_; ++round) {
        const std::string where =
            " of round " + std::to_string(round) + " from rank " + std::to_string(peer) + " is not what was sent";
        for (uint32_t i = 0; i < lines_; ++i) {
          if (differ(received_[at(rank, peer, round, i)], source_[at(peer, rank, round, i)])) {
            return "line " + std::to_string(i) + where;
          }
        }
        const auto* const first_word = reinterpret_cast<const uint64_t*>(&source_[at(peer, rank, round, 0)]);
        if (form_ == Form::kPut && words_[(rank * ranks_ + peer) * rounds_ + round] != *first_word) {
          return "the word" + where;
        }
      }
    }
    return "";
  }

  uint64_t operations() const override { return 0; }

  std::string name() const override {
    const char* const names[] = {"put", "get", "packets", "port"};
    return std::string(names[static_cast<uint32_t>(form_)]) + " of " + std::to_string(lines_) + " lines, " +
           std::to_string(rounds_) + " rounds (threads " + std::to_string(threads_) + ")";
  }

 private:
  size_t at(uint32_t rank, uint32_t peer, uint32_t round, uint32_t line) const {
    return ((static_cast<size_t>(rank) * ranks_ + peer) * rounds_ + round) * lines_ + line;
  }

  Form form_;
  uint32_t ranks_;
  uint32_t lines_;
  uint32_t rounds_;
  uint32_t threads_;
  uint32_t first_flag_;
  std::vector<Line> source_;
  std::vector<Line> received_;
  std::vector<uint64_t> words_;
};

}  // namespace drill
