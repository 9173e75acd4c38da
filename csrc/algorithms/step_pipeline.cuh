// StepPipeline: algorithms that send, combine and collect a message chunk by chunk, with one team (warp role) for each
// of these. Used by push_hb, push_switch, one_shot_hb, two_shot_hb, two_shot_port and the ld_reduce algorithms of
// all-reduce and reduce-scatter, and by row_tiles.cuh. In step t (hb_session.cuh)
//
//   team 0   sends chunk t: of each shard to the shard's owner, or of its own shard to all ranks
//   team 1   combines chunk t - depth: reduces the contributions to its shard, or copies what the ranks have sent
//   team 2   collects chunk t - 2 * depth of the other ranks' sums; only in algorithms with a second hop
//
// `Buffers` is the transport: threads store to peers' staging memory and add (ChunkBuffers), or the NVLink switch does
// (optional/switch_chunks.cuh).
//
// Why a buffer may be reused (terms of hb_session.cuh):
//   - Within an operation a hop has 2 * depth buffers. Chunk t overwrites chunk t - 2 * depth, which was read `depth`
//     steps earlier. The second hop lags the first by `depth` steps on all ranks, so the same holds for it.
//   - H1: the first hop uses the first half. A rank waits at its end for the step in which each peer reads the last
//     chunk, so all of the first half has been read.
//   - H2: the second hop uses the second half, starting with step `depth`. So do copies of a rank's own sums.
// R1 of operation.cuh: a block waits for each peer. R2: no slot is used.
#pragma once

#include <type_traits>

#include "algorithms/chunked.cuh"

namespace llm_comm::inline LLM_COMM_TARGET {

// Each hop uses one half of the staging memory.
inline constexpr uint32_t kFirstHop = 0;
inline constexpr uint32_t kSecondHop = 1;

// Buffers for the chunks of all blocks in one half of each rank's staging memory: 2 * depth stages, used round-robin.
// Layout: [stage][block][sender][line], for each of the other ranks as sender, and if `HasOwn` for the rank itself.
template <int World, bool HasOwn>
class ChunkBuffersOf {
 public:
  static constexpr bool kGoThroughSwitch = false;

  LLM_COMM_DEVICE ChunkBuffersOf(const DeviceComm& comm, uint32_t block, uint32_t chunk_lines, uint32_t depth)
      : comm_(comm), ranks_(comm.world_size), block_(block), chunk_lines_(chunk_lines), stages_(2 * depth) {}

  // Buffer on this rank that receives chunk t of `sender`.
  LLM_COMM_DEVICE const Line* from(uint32_t hop, uint32_t t, uint32_t sender) const {
    return of(comm_.rank, hop, t, sender);
  }

  // Buffer in which this rank keeps its own chunk t.
  LLM_COMM_DEVICE Line* own(uint32_t hop, uint32_t t) const {
    static_assert(HasOwn);
    return of(comm_.rank, hop, t, comm_.rank);
  }

  // Buffers that receive chunk t of the other ranks; of(i): of the i-th of them, in rank order.
  class FromOthers {
   public:
    LLM_COMM_DEVICE FromOthers(const ChunkBuffersOf& buffers, uint32_t hop, uint32_t t)
        : first_(buffers.from(hop, t, !HasOwn && buffers.comm_.rank == 0 ? 1 : 0)),
          rank_(buffers.comm_.rank),
          chunk_lines_(buffers.chunk_lines_) {}
    LLM_COMM_DEVICE const Line* of(uint32_t i) const {
      return first_ + (HasOwn && i >= rank_ ? i + 1 : i) * chunk_lines_;
    }

   private:
    const Line* first_;
    uint32_t rank_;
    uint32_t chunk_lines_;
  };

  // Calls visit(owner, buffer) for each shard whose chunk t is sent through a buffer.
  template <class Visit>
  LLM_COMM_DEVICE void for_each_staged(uint32_t t, Visit visit) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < ranks_.count(); ++i) {
      const uint32_t to = ranks_.after(comm_.rank, i);  // every rank starts with another peer
      visit(to, of(to, kFirstHop, t, comm_.rank));
    }
  }

  // Reduces chunk t of this rank's shard. own(k): this rank's contribution to line k. store(k, sum): takes the result.
  template <DataType D, class Own, class Store>
  LLM_COMM_DEVICE void sum(const Team& team, uint32_t lines, uint32_t t, Own own, Store store) const {
    sum_chunk<D, World>(
        team, lines,
        [&](uint32_t of, uint32_t k) { return of == comm_.rank ? own(k) : load_line(from(kFirstHop, t, of) + k); },
        store, ranks_);
  }

  // Stores lines of this rank's chunk t to the buffers of all peers.
  class ToOthersInRegisters {
   public:
    LLM_COMM_DEVICE ToOthersInRegisters(const ChunkBuffersOf& buffers, uint32_t hop, uint32_t t) {
      const uint32_t rank = buffers.comm_.rank;
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 1; i < World; ++i) targets_[i] = buffers.of((rank + i) % World, hop, t, rank);
    }
    LLM_COMM_DEVICE void store(uint32_t k, Line line) const {
      for_each([&](Line* target) { store_line(target + k, line); });
    }
    // Calls visit(buffer) for the buffer of each peer.
    template <class Visit>
    LLM_COMM_DEVICE void for_each(Visit visit) const {
      LLM_COMM_UNROLL(8)
      for (uint32_t i = 1; i < World; ++i) visit(targets_[i]);
    }

   private:
    Line* targets_[World];
  };
  // The same for worlds whose addresses take too many registers: computes each address at its use.
  class ToManyOthers {
   public:
    LLM_COMM_DEVICE ToManyOthers(const ChunkBuffersOf& buffers, uint32_t hop, uint32_t t)
        : buffers_(buffers), hop_(hop), t_(t) {}
    LLM_COMM_DEVICE void store(uint32_t k, Line line) const {
      for_each([&](Line* target) { store_line(target + k, line); });
    }
    template <class Visit>
    LLM_COMM_DEVICE void for_each(Visit visit) const {
      const uint32_t rank = buffers_.comm_.rank;
      LLM_COMM_UNROLL(1)
      for (uint32_t i = 1; i < buffers_.ranks_.count(); ++i) {
        visit(buffers_.of(buffers_.ranks_.after(rank, i), hop_, t_, rank));
      }
    }

   private:
    const ChunkBuffersOf& buffers_;
    uint32_t hop_;
    uint32_t t_;
  };
  using ToOthers = std::conditional_t<kIsExactWorld<World>, ToOthersInRegisters, ToManyOthers>;

  // Called by the signal threads before they signal a step.
  LLM_COMM_DEVICE static void fence() {}

 private:
  // Buffer on `receiver` for chunk t of `sender`.
  LLM_COMM_DEVICE Line* of(uint32_t receiver, uint32_t hop, uint32_t t, uint32_t sender) const {
    const uint32_t senders = HasOwn ? ranks_.count() : ranks_.count() - 1;
    const uint64_t buffer =
        (uint64_t{t % stages_} * block_count() + block_) * senders + (HasOwn ? sender : among_others(sender, receiver));
    return staging_of(comm_, receiver, hop) + buffer * chunk_lines_;
  }

  const DeviceComm& comm_;
  Ranks<World> ranks_;
  uint32_t block_;
  uint32_t chunk_lines_;
  uint32_t stages_;
};

template <int World>
using ChunkBuffers = ChunkBuffersOf<World, false>;
template <int World>
using ChunkBuffersWithOwn = ChunkBuffersOf<World, true>;

// The pipeline of one block. A shard is a view with lines(), load(line) and store(line, value).
// `Teams`: EqualTeams or TeamShares.
template <DataType D, int World, class Buffers = ChunkBuffers<World>, class Teams = EqualTeams>
class StepPipeline {
 public:
  // `shard_lines`: lines of the largest shard.
  LLM_COMM_DEVICE StepPipeline(HBSession& session, const DeviceComm& comm, uint32_t block, uint32_t chunk_lines,
                               uint32_t depth, uint32_t shard_lines)
      : session_(session),
        rank_(comm.rank),
        ranks_(comm.world_size),
        depth_(depth),
        chunks_(block, chunk_lines, shard_lines),
        buffers_(comm, block, chunk_lines, depth) {}

  LLM_COMM_DEVICE uint32_t chunks() const { return chunks_.count(); }
  // First line of chunk t in a shard.
  LLM_COMM_DEVICE uint32_t first(uint32_t t) const { return chunks_.first(t); }
  LLM_COMM_DEVICE const Buffers& buffers() const { return buffers_; }

  // Runs all steps. Each job belongs to one team: job(team, t) processes chunk t.
  template <class... Jobs>
  LLM_COMM_DEVICE void run(Jobs... jobs) const {
    run_and_tell(HBSession::NothingMore(), jobs...);
  }
  // `ended`: as in HBSession::run().
  template <class Ended, class... Jobs>
  LLM_COMM_DEVICE void run_and_tell(Ended ended, Jobs... jobs) const {
    const auto work = [&](uint32_t step) {
      const Team team = Teams::of(session_, sizeof...(Jobs));
      uint32_t number = 0;
      const auto give = [&](const auto& job) {
        const uint32_t behind = number * depth_;
        // For the third team there are exactly as many steps as chunks, so it needs no upper bound.
        const bool has_chunk = step >= behind && (number == 2 || step - behind < chunks_.count());
        if (team.number == number++ && has_chunk) job(team, step - behind);
      };
      (give(jobs), ...);
    };
    const auto phase_of = [&](uint32_t step) { return sizeof...(Jobs) < 3 || step < 2 * depth_ ? kScatter : kGather; };
    session_.run(chunks_.count(), depth_, work, phase_of, ended, [](uint32_t) { Buffers::fence(); });
  }

  // Sends chunk t of the shards of other owners. shard_of(owner): view of this rank's contribution to a shard.
  template <class ShardOf>
  LLM_COMM_DEVICE void stage(const Team& team, uint32_t t, ShardOf shard_of) const {
    if constexpr (kLinkForEachPeer && !Buffers::kGoThroughSwitch) {
      stage_by_lines(team, t, shard_of);
    } else {
      stage_by_owners(team, t, shard_of);
    }
  }

  // Reduces chunk t of this rank's shard into `sums`. `own`: this rank's contribution.
  template <class Own, class Sums>
  LLM_COMM_DEVICE void sum(const Team& team, uint32_t t, const Own& own, const Sums& sums) const {
    sum_with(team, t, own, sums, [](uint32_t, Line) {});
  }
  // sum(), with the sums also stored to all peers.
  template <class Own, class Sums>
  LLM_COMM_DEVICE void sum_for_all(const Team& team, uint32_t t, const Own& own, const Sums& sums) const {
    const typename Buffers::ToOthers others(buffers_, kSecondHop, t);
    sum_with(team, t, own, sums, [&](uint32_t k, Line sum) { others.store(k, sum); });
  }

  // Stores chunk t of this rank's shard to all peers, and to `target` on this rank.
  template <class Source, class Target>
  LLM_COMM_DEVICE void spread(const Team& team, uint32_t t, const Source& source, const Target& target) const {
    const typename Buffers::ToOthers others(buffers_, kFirstHop, t);
    const uint32_t first = chunks_.first(t);
    move_lines(
        team, chunks_.lines(t, source.lines()), [&](uint32_t k) { return source.load(first + k); },
        [&](uint32_t k, Line line) {
          others.store(k, line);
          target.store(first + k, line);
        });
  }

  // Copies chunk t from one view of this rank's memory to another one.
  template <class From, class To>
  LLM_COMM_DEVICE void copy(const Team& team, uint32_t t, const From& from, const To& to) const {
    const uint32_t first = chunks_.first(t);
    move_lines(
        team, chunks_.lines(t, from.lines()), [&](uint32_t k) { return from.load(first + k); },
        [&](uint32_t k, Line line) { to.store(first + k, line); });
  }

  // Copies chunk t of each other rank's shard to its destination, shard_of(owner).
  template <class ShardOf>
  LLM_COMM_DEVICE void collect(const Team& team, uint32_t hop, uint32_t t, ShardOf shard_of) const {
    LLM_COMM_UNROLL(1)
    for (uint32_t i = 1; i < ranks_.count(); ++i) {
      const uint32_t owner = ranks_.after(rank_, i);
      const auto& shard = shard_of(owner);
      const Line* const sent = buffers_.from(hop, t, owner);
      const uint32_t first = chunks_.first(t);
      move_lines(
          team, chunks_.lines(t, shard.lines()), [&](uint32_t k) { return load_line(sent + k); },
          [&](uint32_t k, Line line) { shard.store(first + k, line); });
    }
  }

 private:
  // One owner after the other: a thread stores to neighbouring lines of one peer.
  template <class ShardOf>
  LLM_COMM_DEVICE void stage_by_owners(const Team& team, uint32_t t, ShardOf shard_of) const {
    buffers_.for_each_staged(t, [&](uint32_t owner, Line* staged) {
      const auto& shard = shard_of(owner);
      const uint32_t first = chunks_.first(t);
      move_lines(
          team, chunks_.lines(t, shard.lines()), [&](uint32_t k) { return shard.load(first + k); },
          [&](uint32_t k, Line line) { store_line(staged + k, line); });
    });
  }

  // A line of each owner at a time, which keeps all links busy: the order of MSCCL++ on MI300X (arXiv 2504.09014).
  template <class ShardOf>
  LLM_COMM_DEVICE void stage_by_lines(const Team& team, uint32_t t, ShardOf shard_of) const {
    const typename Buffers::ToOthers others(buffers_, kFirstHop, t);
    const uint32_t first = chunks_.first(t);
    for (uint32_t k = team.thread; k < chunks_.chunk_lines(); k += team.threads) {
      // Calls step(i, buffer, shard) for each i-th rank after this one whose shard has the line.
      const auto for_each_owner = [&](auto step) {
        uint32_t i = 0;
        others.for_each([&](Line* buffer) {
          const auto& shard = shard_of(ranks_.after(rank_, ++i));
          if (k < chunks_.lines(t, shard.lines())) step(i, buffer, shard);
        });
      };
      if constexpr (kIsExactWorld<World>) {
        Line line[World];  // the loads of all owners are in flight together
        for_each_owner([&](uint32_t i, Line*, const auto& shard) { line[i] = shard.load(first + k); });
        for_each_owner([&](uint32_t i, Line* buffer, const auto&) { store_line(buffer + k, line[i]); });
      } else {
        for_each_owner(
            [&](uint32_t, Line* buffer, const auto& shard) { store_line(buffer + k, shard.load(first + k)); });
      }
    }
  }

  template <class Own, class Sums, class Spread>
  LLM_COMM_DEVICE void sum_with(const Team& team, uint32_t t, const Own& own, const Sums& sums, Spread spread) const {
    const uint32_t first = chunks_.first(t);
    buffers_.template sum<D>(
        team, chunks_.lines(t, own.lines()), t, [&](uint32_t k) { return own.load(first + k); },
        [&](uint32_t k, Line sum) {
          sums.store(first + k, sum);
          spread(k, sum);
        });
  }

  HBSession& session_;
  uint32_t rank_;
  Ranks<World> ranks_;
  uint32_t depth_;
  Chunks chunks_;
  Buffers buffers_;
};

}  // namespace llm_comm::inline LLM_COMM_TARGET
