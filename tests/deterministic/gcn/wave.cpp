#include "wave.h"

#include <cstring>
#include <memory>
#include <stdexcept>

namespace gcn {

namespace {

using Space = AccessKind::Space;
using What = AccessKind::What;

// Accesses that vmcnt counts at most; the next one waits.
constexpr size_t kMostCounted = 63;
// Instructions between two turns of others, for a wave that polls its local memory without s_sleep.
constexpr uint64_t kTurn = 4096;

template <class T>
T loaded(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint32_t extended(uint32_t word, const AccessKind& access) {
  const uint32_t unused = 32 - 8 * access.bytes;
  return access.is_signed ? static_cast<uint32_t>(static_cast<int32_t>(word << unused) >> unused)
                          : word << unused >> unused;
}

}  // namespace

void Wave::fail(const std::string& what) {
  grid_->machine->memory().fail(grid_->kernel->place(*current_) + ": " + what);
  for (;;) emulator::yield();
}

void Wave::start(const Grid& grid) {
  grid_ = &grid;
  current_ = grid.kernel->instructions.data();
  const auto& self = emulator::self();
  const uint32_t garbage = emulator::draw_below(~0u);
  s.fill(garbage);
  for (uint32_t i = 0; i < grid.kernel->vector_registers; ++i) v[i].fill(garbage);
  set_pair(0, reinterpret_cast<uint64_t>(grid.arguments.data()));
  s[2] = self.block_index;
  const uint32_t lanes = std::min(kLanes, self.block_threads - self.thread_index);
  set_pair(kExec, ~uint64_t{0} >> (kLanes - lanes));
  for (uint32_t lane = 0; lane < kLanes; ++lane) v[0][lane] = self.thread_index + lane;
  scc = false;
  next = 0;
  has_ended = false;
  vector_accesses_.clear();
  local_accesses_.clear();
  issued_ = write_back_number_ = write_back_snapshot_ = 0;
  pending_vectors_ = {};
  pending_scalars_ = {};
  pending_ = 0;
}

void Wave::run(const Grid& grid) {
  start(grid);
  for (uint64_t count = 1; !has_ended; ++count) {
    if (next >= grid.kernel->instructions.size()) fail("the wave runs off the end of the kernel");
    current_ = &grid.kernel->instructions[next++];
    if (pending_ != 0) check_pending(*current_);
    current_->opcode->handler(*this, *current_);
    if (count % kTurn == 0) emulator::yield();
  }
  complete_down_to(vector_accesses_, 0);
  complete_down_to(local_accesses_, 0);
}

// ---- Registers that loads have not written yet ---------------------------------------------------------------------

void Wave::check_pending(const Instruction& in) {
  for (uint32_t i = 0; i < in.operands; ++i) {
    const Operand& operand = in.operand[i];
    if (!operand.is_register()) continue;
    const bool is_vector = operand.kind == Operand::Kind::kVector;
    // The queue whose loads may be followed by this load into the same register.
    const bool is_loaded = i == 0 && is_vector && in.has_result();
    const uint32_t same = !is_loaded ? 2 : in.opcode->access.space == Space::kGlobal ? 0 : 1;
    for (uint32_t reg = operand.reg; reg < uint32_t{operand.reg} + operand.registers; ++reg) {
      bool is_pending = !is_vector && pending_scalars_[reg] != 0;
      for (uint32_t queue = 0; is_vector && queue < 2; ++queue) {
        is_pending |= queue != same && pending_vectors_[queue][reg] != 0;
      }
      if (!is_pending) continue;
      fail("pending register: a load into " + std::string(is_vector ? "v" : "s") + std::to_string(reg) +
           " has not been waited for");
    }
  }
}

void Wave::count_pending(const Instruction& in, int change) {
  if (!in.has_result()) return;
  const Operand& to = in.operand[0];
  auto* const counts = to.kind == Operand::Kind::kScalar
                           ? pending_scalars_.data()
                           : pending_vectors_[in.opcode->access.space != Space::kGlobal].data();
  for (uint32_t i = 0; i < to.registers; ++i) counts[to.reg + i] = static_cast<uint8_t>(counts[to.reg + i] + change);
  pending_ += static_cast<uint32_t>(change);
}

// ---- Issue ---------------------------------------------------------------------------------------------------------

uint64_t Wave::address_of(const Instruction& in, uint32_t lane) const {
  const uint32_t at = in.has_result() ? 1 : 0;
  const uint32_t reg = in.operand[at].reg;
  if (in.opcode->access.space == Space::kLocal) return v[reg][lane] + static_cast<uint64_t>(in.offset);
  const Operand& base = in.operand[in.operands - 1];
  const uint64_t address = base.kind == Operand::Kind::kOff ? v[reg][lane] | uint64_t{v[reg + 1][lane]} << 32
                                                            : pair(base.reg) + v[reg][lane];
  return address + static_cast<uint64_t>(in.offset);
}

void Wave::issue(const Instruction& in) {
  const AccessKind& kind = in.opcode->access;
  const bool is_vector = kind.space == Space::kGlobal;
  Queue& queue = is_vector ? vector_accesses_ : local_accesses_;
  if (queue.size() >= kMostCounted) complete_first(queue);
  Access& access = queue.emplace_back();
  access.in = &in;
  access.exec = exec();
  access.number = issued_ += is_vector ? 1 : 0;
  const bool has_address = kind.what != What::kWriteBack && kind.what != What::kReadClock;
  if (kind.space == Space::kScalar) {
    if (has_address) {
      const Operand& offset = in.operand[2];
      access.address[0] = pair(in.operand[1].reg) + static_cast<uint64_t>(in.offset) +
                          (offset.kind == Operand::Kind::kScalar ? s[offset.reg] : offset.constant);
    }
  } else if (has_address) {
    const uint32_t data = in.operand[in.has_result() ? 2 : 1].reg;
    for_each_lane(access.exec, [&](uint32_t lane) {
      access.address[lane] = address_of(in, lane);
      for (uint32_t i = 0; i < kind.data_registers; ++i) access.data[lane][i] = v[data + i][lane];
      if (kind.takes_high) access.data[lane][0] >>= 16;
    });
    if (kind.what == What::kExchangeLanes) {
      std::array<uint32_t, kLanes> results{};  // 0 from inactive lanes
      for_each_lane(access.exec, [&](uint32_t lane) {
        const uint32_t from = access.address[lane] / 4 % kLanes;
        if (access.exec >> from & 1) results[lane] = v[data][from];
      });
      for (uint32_t lane = 0; lane < kLanes; ++lane) access.data[lane][0] = results[lane];
    }
  }
  count_pending(in, 1);
  complete_some();
}

// ---- Completion ----------------------------------------------------------------------------------------------------

void Wave::complete_first(Queue& queue) {
  Access access = queue.front();
  queue.pop_front();
  carry_out(access);
  count_pending(*access.in, -1);
}

void Wave::complete_down_to(Queue& queue, size_t count) {
  while (queue.size() > count) complete_first(queue);
}

void Wave::complete_some() {
  for (Queue* const queue : {&vector_accesses_, &local_accesses_}) {
    if (queue->empty() || emulator::draw_below(4) != 0) continue;
    complete_down_to(*queue, emulator::draw_below(static_cast<uint32_t>(queue->size())));
  }
}

void Wave::wait(uint32_t vector_count, uint32_t local_count) {
  if (local_count < local_accesses_.size()) {
    bool is_ordered = true;
    for (const Access& access : local_accesses_) is_ordered &= access.in->opcode->access.space == Space::kLocal;
    if (is_ordered || local_count == 0) complete_down_to(local_accesses_, local_count);
  }
  if (vector_count == ~0u) return;
  complete_down_to(vector_accesses_, vector_count);
  if (write_back_snapshot_ == 0 || write_back_number_ + vector_count > issued_) return;
  // Stores that are still under way were issued before the wait: they must not carry the snapshot.
  complete_down_to(vector_accesses_, 0);
  grid_->machine->end_release(write_back_snapshot_);
  write_back_snapshot_ = 0;
}

void Wave::carry_out(Access& access) {
  const AccessKind& kind = access.in->opcode->access;
  if (kind.what == What::kWriteBack) {
    write_back_number_ = access.number;
    write_back_snapshot_ = grid_->machine->begin_release();
    return;
  }
  if (kind.space == Space::kScalar) {
    carry_out_scalar(access);
    return;
  }
  // No order of the lanes is defined: they begin with any of them. Lanes that load from one address share the access: the
  // compiler relies on it that a load from a uniform address has a uniform result.
  const uint32_t first = emulator::draw_below(kLanes);
  const bool shares = kind.space == Space::kGlobal && kind.what == What::kLoad;
  uint64_t done = 0;
  for (const uint64_t lanes : {access.exec >> first << first, access.exec & ~(~uint64_t{0} << first)}) {
    for_each_lane(lanes, [&](uint32_t lane) {
      uint64_t before = shares ? done : 0;
      while (before != 0 && access.address[std::countr_zero(before)] != access.address[lane]) before &= before - 1;
      done |= uint64_t{1} << lane;
      if (before != 0) {
        const auto other = static_cast<uint32_t>(std::countr_zero(before));
        const Operand& to = access.in->operand[0];
        for (uint32_t i = 0; i < to.registers; ++i) v[to.reg + i][lane] = v[to.reg + i][other];
      } else if (kind.what == What::kExchangeLanes) {
        deliver(*access.in, lane, access.data[lane].data());
      } else if (kind.space == Space::kLocal) {
        carry_out_local(access, lane);
      } else {
        carry_out_global(access, lane);
      }
    });
  }
}

void Wave::deliver(const Instruction& in, uint32_t lane, const uint32_t* words) {
  for (uint32_t i = 0; i < in.operand[0].registers; ++i) v[in.operand[0].reg + i][lane] = words[i];
}

bool Wave::is_of_line(const void* address) const {
  const emulator::WeakMemory& memory = grid_->machine->memory();
  if (!memory.contains(address)) return false;
  const uint64_t offset = memory.offset_of(address) % memory.bytes_of_rank();
  return offset >= grid_->lines_begin && offset < grid_->lines_end;
}

void Wave::carry_out_global(const Access& access, uint32_t lane) {
  const Instruction& in = *access.in;
  const AccessKind& kind = in.opcode->access;
  auto* const address = reinterpret_cast<char*>(access.address[lane]);
  const bool is_modelled = grid_->machine->memory().contains(address);
  if (access.address[lane] < 4096) fail("an access to address " + std::to_string(access.address[lane]));
  if (is_modelled && access.address[lane] % std::min<uint32_t>(kind.bytes, 4) != 0) fail("a misaligned access");
  std::array<uint32_t, 4> words = access.data[lane];
  if (kind.what == What::kModify) {
    const uint64_t found = emulator::modify(address, kind.bytes, kind.update, words.data());
    std::memcpy(words.data(), &found, sizeof(found));
    if (in.has_result()) deliver(in, lane, words.data());
    return;
  }
  const bool is_relaxed = in.sc0 && in.sc1;
  // The model lets every store become visible by and by. Caches of a GPU do not.
  if (!is_relaxed && is_of_line(address)) fail("an access to a line that does not go past the caches");
  const auto order = is_relaxed ? emulator::Order::kRelaxed : emulator::Order::kWeak;
  if (kind.bytes >= 4) {
    const uint32_t unit = is_relaxed && kind.bytes % 8 == 0 && is_modelled && !is_of_line(address) ? 8 : 4;
    if (kind.what == What::kStore) {
      emulator::store(address, words.data(), kind.bytes, unit, order);
    } else {
      emulator::load(address, words.data(), kind.bytes, unit, order);
      deliver(in, lane, words.data());
    }
    return;
  }
  // The model of memory knows words of 4 bytes. A store to a part of a word is a load and a store here. No other thread
  // may store to the word meanwhile: in modelled memory, one thread writes all parts of a word.
  const uint32_t byte = is_modelled ? access.address[lane] % 4 : 0;
  const uint32_t bytes = is_modelled ? 4 : kind.bytes;
  uint32_t word = 0;
  if (is_modelled || kind.what == What::kLoad) emulator::load(address - byte, &word, bytes, 4, order);
  if (kind.what == What::kLoad) {
    word = extended(word >> 8 * byte, kind);
    deliver(in, lane, &word);
    return;
  }
  std::memcpy(reinterpret_cast<char*>(&word) + byte, words.data(), kind.bytes);
  emulator::store(address - byte, &word, bytes, 4, order);
}

void Wave::carry_out_local(const Access& access, uint32_t lane) {
  const Instruction& in = *access.in;
  const AccessKind& kind = in.opcode->access;
  const uint64_t offset = access.address[lane];
  if (offset + kind.bytes > grid_->shared_bytes) {
    fail("an access to byte " + std::to_string(offset) + " of local memory, which has " +
         std::to_string(grid_->shared_bytes));
  }
  char* const at = static_cast<char*>(emulator::self().shared_memory) + offset;
  std::array<uint32_t, 4> words = access.data[lane];
  if (kind.what == What::kStore) {
    std::memcpy(at, words.data(), kind.bytes);
    return;
  }
  std::array<uint32_t, 4> found = {};
  std::memcpy(found.data(), at, kind.bytes);
  if (kind.what == What::kModify) {
    const uint64_t value = kind.update(loaded<uint64_t>(found.data()), words.data());
    std::memcpy(at, &value, kind.bytes);
  }
  if (kind.bytes < 4) found[0] = extended(found[0], kind);
  if (in.has_result()) deliver(in, lane, found.data());
}

void Wave::carry_out_scalar(const Access& access) {
  const Operand& to = access.in->operand[0];
  if (access.in->opcode->access.what == What::kReadClock) {
    set_pair(to.reg, emulator::virtual_clock_ns() / 10);  // counts at 100 MHz
    return;
  }
  const auto* const address = reinterpret_cast<const char*>(access.address[0] & ~uint64_t{3});
  // The cache of scalars knows no order: buffer_inv does not drop it.
  if (grid_->machine->memory().contains(address)) fail("a scalar load of memory that ranks share");
  emulator::load(address, &s[to.reg], 4 * to.registers, 4, emulator::Order::kWeak);
}

// ---- Launch --------------------------------------------------------------------------------------------------------

namespace {

std::vector<uint64_t> arguments_of(const Kernel& kernel, const emulator::LaunchConfig& config, const void* argument,
                                   uint32_t argument_bytes) {
  const std::map<std::string_view, uint64_t> hidden = {{"hidden_block_count_x", config.blocks},
                                                       {"hidden_block_count_y", 1},
                                                       {"hidden_block_count_z", 1},
                                                       {"hidden_group_size_x", config.threads},
                                                       {"hidden_group_size_y", 1},
                                                       {"hidden_group_size_z", 1},
                                                       {"hidden_remainder_x", 0},
                                                       {"hidden_remainder_y", 0},
                                                       {"hidden_remainder_z", 0},
                                                       {"hidden_global_offset_x", 0},
                                                       {"hidden_global_offset_y", 0},
                                                       {"hidden_global_offset_z", 0},
                                                       {"hidden_grid_dims", 1},
                                                       {"hidden_dynamic_lds_size", config.shared_bytes}};
  std::vector<uint64_t> segment((kernel.argument_bytes + 7) / 8, 0x5555555555555555);
  for (const Argument& one : kernel.arguments) {
    char* const at = reinterpret_cast<char*>(segment.data()) + one.offset;
    const auto found = hidden.find(one.kind);
    if (one.offset + one.bytes > kernel.argument_bytes) throw std::runtime_error(kernel.name + ": arguments overflow");
    if (one.kind == "by_value" && one.offset == 0 && one.bytes == argument_bytes) {
      std::memcpy(at, argument, one.bytes);
    } else if (found != hidden.end()) {
      std::memcpy(at, &found->second, one.bytes);
    } else {
      throw std::runtime_error(kernel.name + ": no such argument is known: " + one.kind + " of " +
                               std::to_string(one.bytes) + " bytes");
    }
  }
  return segment;
}

}  // namespace

std::function<void()> job_of(emulator::Machine& machine, const Kernel& kernel, const emulator::LaunchConfig& config,
                             const void* argument, uint32_t argument_bytes, uint64_t lines_begin, uint64_t lines_end) {
  const auto grid = std::make_shared<Grid>(Grid{&machine,
                                                &kernel,
                                                arguments_of(kernel, config, argument, argument_bytes),
                                                static_cast<uint32_t>(config.shared_bytes),
                                                lines_begin,
                                                lines_end,
                                                {},
                                                {}});
  return [grid] {
    if (grid->idle.empty()) {
      grid->waves.push_back(std::make_unique<Wave>());
      grid->idle.push_back(grid->waves.back().get());
    }
    Wave* const wave = grid->idle.back();
    grid->idle.pop_back();
    wave->run(*grid);
    grid->idle.push_back(wave);
  };
}

}  // namespace gcn
