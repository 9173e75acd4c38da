// Every collective that is served, bit for bit, on ranks that are threads or processes: all types, counts from 1 on, in place and out
// of it, aligned and not, alone and in groups, of one communicator and of two whose calls are not in step.
// Usage: collectives threads|processes <world> [<calls>].
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ranks.h"
#include "values.h"

namespace {

using nccl_test::Rank;
using nccl_test::Tensor;

constexpr ncclDataType_t kTypes[] = {ncclFloat32, ncclFloat16, ncclBfloat16};

// An element of a rank's input. Sums over 8 ranks stay below 256, which bf16 has exactly.
float value(int rank, uint64_t element, uint64_t call) {
  return static_cast<float>((static_cast<uint64_t>(rank) * 7 + element * 3 + call) % 29);
}

float sum(int world, uint64_t element, uint64_t call) {
  float total = 0;
  for (int rank = 0; rank < world; ++rank) total += value(rank, element, call);
  return total;
}

// Beside its tensors, what is known of a call before it is made.
struct Case {
  ncclDataType_t type;
  uint64_t count;
  uint64_t shift;
  uint64_t number;
  bool in_place;
};

// A call, and how to look at its result once it has ended.
class Call {
 public:
  Call(int rank, int world, const Case& of) : rank_(rank), world_(world), of_(of) {}
  virtual ~Call() = default;
  virtual void enqueue(ncclComm_t comm) = 0;
  virtual void check() = 0;

 protected:
  uint64_t world() const { return static_cast<uint64_t>(world_); }
  uint64_t rank() const { return static_cast<uint64_t>(rank_); }
  Tensor filled(uint64_t count, uint64_t first = 0) const {
    Tensor tensor(of_.type, count, of_.shift);
    for (uint64_t i = 0; i < count; ++i) tensor.set(i, value(rank_, first + i, of_.number));
    return tensor;
  }
  Tensor empty(uint64_t count) const { return Tensor(of_.type, count, of_.shift); }

  int rank_;
  int world_;
  Case of_;
};

class AllReduce : public Call {
 public:
  AllReduce(int rank, int world, const Case& of) : Call(rank, world, of), in_(filled(of.count)), out_(empty(of.count)) {
    if (of.in_place) out_ = in_;
  }
  void enqueue(ncclComm_t comm) override {
    EXPECT_OK(ncclAllReduce((of_.in_place ? out_ : in_).at(), out_.at(), of_.count, of_.type, ncclSum, comm, nullptr));
  }
  void check() override {
    Tensor wanted = empty(of_.count);
    for (uint64_t i = 0; i < of_.count; ++i) wanted.set(i, sum(world_, i, of_.number));
    EXPECT(out_ == wanted);
  }

 private:
  Tensor in_;
  Tensor out_;
};

class AllGather : public Call {
 public:
  AllGather(int rank, int world, const Case& of)
      : Call(rank, world, of), in_(filled(of.count)), out_(empty(of.count * this->world())) {
    for (uint64_t i = 0; i < of.count && of.in_place; ++i)
      out_.set(this->rank() * of.count + i, value(rank, i, of.number));
  }
  void enqueue(ncclComm_t comm) override {
    void* const from = of_.in_place ? out_.at(rank() * of_.count) : in_.at();
    EXPECT_OK(ncclAllGather(from, out_.at(), of_.count, of_.type, comm, nullptr));
  }
  void check() override {
    Tensor wanted = empty(of_.count * world());
    for (int rank = 0; rank < world_; ++rank) {
      for (uint64_t i = 0; i < of_.count; ++i) {
        wanted.set(static_cast<uint64_t>(rank) * of_.count + i, value(rank, i, of_.number));
      }
    }
    EXPECT(out_ == wanted);
  }

 private:
  Tensor in_;
  Tensor out_;
};

class ReduceScatter : public Call {
 public:
  ReduceScatter(int rank, int world, const Case& of)
      : Call(rank, world, of), in_(filled(of.count * this->world())), out_(empty(of.count)) {}
  void enqueue(ncclComm_t comm) override {
    void* const to = of_.in_place ? in_.at(rank() * of_.count) : out_.at();
    EXPECT_OK(ncclReduceScatter(in_.at(), to, of_.count, of_.type, ncclSum, comm, nullptr));
  }
  void check() override {
    Tensor wanted = of_.in_place ? filled(of_.count * world()) : empty(of_.count);
    for (uint64_t i = 0; i < of_.count; ++i) {
      const uint64_t element = rank() * of_.count + i;
      wanted.set(of_.in_place ? element : i, sum(world_, element, of_.number));
    }
    EXPECT((of_.in_place ? in_ : out_) == wanted);
  }

 private:
  Tensor in_;
  Tensor out_;
};

class AllToAll : public Call {
 public:
  AllToAll(int rank, int world, const Case& of)
      : Call(rank, world, of), in_(filled(of.count * this->world())), out_(empty(of.count * this->world())) {
    if (of.in_place) out_ = in_;
  }
  void enqueue(ncclComm_t comm) override {
    EXPECT_OK(ncclAlltoAll((of_.in_place ? out_ : in_).at(), out_.at(), of_.count, of_.type, comm, nullptr));
  }
  void check() override {
    Tensor wanted = empty(of_.count * world());
    for (int from = 0; from < world_; ++from) {
      for (uint64_t i = 0; i < of_.count; ++i) {
        wanted.set(static_cast<uint64_t>(from) * of_.count + i, value(from, rank() * of_.count + i, of_.number));
      }
    }
    EXPECT(out_ == wanted);
  }

 private:
  Tensor in_;
  Tensor out_;
};

class Broadcast : public Call {
 public:
  Broadcast(int rank, int world, const Case& of)
      : Call(rank, world, of),
        root_(static_cast<int>(of.number % this->world())),
        in_(filled(of.count)),
        out_(empty(of.count)) {
    if (of.in_place && rank == root_) out_ = in_;
  }
  void enqueue(ncclComm_t comm) override {
    if (of_.in_place) {
      EXPECT_OK(ncclBcast(out_.at(), of_.count, of_.type, root_, comm, nullptr));
      return;
    }
    // What the others send is not looked at.
    const void* const from = rank_ == root_ ? in_.at() : nullptr;
    EXPECT_OK(ncclBroadcast(from, out_.at(), of_.count, of_.type, root_, comm, nullptr));
  }
  void check() override {
    Tensor wanted = empty(of_.count);
    for (uint64_t i = 0; i < of_.count; ++i) wanted.set(i, value(root_, i, of_.number));
    EXPECT(out_ == wanted);
  }

 private:
  int root_;
  Tensor in_;
  Tensor out_;
};

std::unique_ptr<Call> make(uint64_t kind, int rank, int world, const Case& of) {
  switch (kind % 5) {
    case 0:
      return std::make_unique<AllReduce>(rank, world, of);
    case 1:
      return std::make_unique<AllGather>(rank, world, of);
    case 2:
      return std::make_unique<ReduceScatter>(rank, world, of);
    case 3:
      return std::make_unique<AllToAll>(rank, world, of);
    default:
      return std::make_unique<Broadcast>(rank, world, of);
  }
}

// The same on all ranks.
std::unique_ptr<Call> draw(std::minstd_rand& random, int rank, int world, uint64_t number) {
  const uint64_t counts[] = {1, 2, 7, 8, 33, 1000, 5000};
  const uint64_t kind = random();
  const Case of{kTypes[random() % 3], counts[random() % 7], random() % 3, number, random() % 2 == 0};
  return make(kind, rank, world, of);
}

void run(Rank& self, uint64_t calls) {
  ncclComm_t first = self.make_communicator();
  ncclComm_t second = self.make_communicator();
  std::minstd_rand random(17);
  for (uint64_t number = 0; number < calls; ++number) {
    // Mostly one call; sometimes a group, over one or both communicators.
    const uint64_t grouped = random() % 4 == 0 ? 1 + random() % 4 : 0;
    if (grouped == 0) {
      const auto call = draw(random, self.rank(), self.world(), number);
      call->enqueue(number % 5 == 0 ? second : first);
      call->check();
      continue;
    }
    std::vector<std::unique_ptr<Call>> group;
    EXPECT_OK(ncclGroupStart());
    if (grouped > 2) EXPECT_OK(ncclGroupStart());
    for (uint64_t i = 0; i < grouped; ++i) {
      group.push_back(draw(random, self.rank(), self.world(), number));
      group.back()->enqueue(random() % 2 == 0 ? first : second);
    }
    if (grouped > 2) EXPECT_OK(ncclGroupEnd());
    EXPECT_OK(ncclGroupEnd());
    for (const auto& call : group) call->check();
  }
  self.barrier();
  EXPECT_OK(ncclCommDestroy(second));
  EXPECT_OK(ncclCommFinalize(first));
  EXPECT_OK(ncclCommDestroy(first));
}

// Several communicators of one thread: all calls of a group are the ranks' own.
void run_in_one_thread(int world, uint64_t calls) {
  std::vector<ncclComm_t> comms(static_cast<size_t>(world));
  EXPECT_OK(ncclCommInitAll(comms.data(), world, nullptr));
  std::minstd_rand random(23);
  for (uint64_t number = 0; number < calls; ++number) {
    std::vector<std::unique_ptr<Call>> group;
    EXPECT_OK(ncclGroupStart());
    const std::minstd_rand same = random;
    for (int rank = 0; rank < world; ++rank) {
      int of = -1;
      EXPECT_OK(ncclCommUserRank(comms[static_cast<size_t>(rank)], &of));
      EXPECT(of == rank);
      random = same;
      group.push_back(draw(random, rank, world, number));
      group.back()->enqueue(comms[static_cast<size_t>(rank)]);
    }
    EXPECT_OK(ncclGroupEnd());
    for (const auto& call : group) call->check();
  }
  for (ncclComm_t comm : comms) EXPECT_OK(ncclCommDestroy(comm));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string kind = argc > 1 ? argv[1] : "threads";
  const int world = argc > 2 ? std::atoi(argv[2]) : 2;
  const uint64_t calls = argc > 3 ? std::strtoull(argv[3], nullptr, 0) : 60;
  if (kind == "one") {
    run_in_one_thread(world, calls);
  } else {
    nccl_test::run_ranks(kind == "threads" ? nccl_test::Ranks::kThreads : nccl_test::Ranks::kProcesses, world,
                         [&](Rank& self) { run(self, calls); });
  }
  return nccl_test::failures() == 0 ? 0 : 1;
}
