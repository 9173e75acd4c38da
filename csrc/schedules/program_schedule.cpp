// Schedules of a DSL kernel. On each rank a call is three grids of a stream: the caller writes the input, the kernel
// runs, and the caller reads the output and overwrites the tensors. A kernel that uses a tensor too early or too late
// is therefore detected.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include "schedules/program_calls.h"
#include "schedules/program_world.h"
#include "schedules/schedule_parameters.h"
#include "schedules/values.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

namespace {

using emulator::Ending;

// Threads of the caller's grids.
constexpr uint32_t kCallerThreads = 4;
// Pattern that the caller writes to tensors that no kernel may use any longer.
constexpr uint32_t kScribble = 0x5A5A5A5Au;

struct Found {
  Failure failure = Failure::kNone;
  uint64_t step = 0;
  uint32_t rank = 0;
  uint32_t peer = 0;
  uint64_t element = 0;
  uint64_t part_bytes = 0;
  std::string text;
};

// Words of a tensor, divided among the caller's threads; whole lines where possible.
template <class Visit>
void for_each_piece(char* first, uint64_t words, Visit visit) {
  constexpr uint64_t kWordsOfLine = sizeof(Line) / sizeof(uint32_t);
  const uint64_t head = std::min(
      words, (sizeof(Line) - reinterpret_cast<uint64_t>(first) % sizeof(Line)) % sizeof(Line) / sizeof(uint32_t));
  uint64_t number = 0;
  for (uint64_t i = 0; i < words;) {
    const bool is_line = i >= head && words - i >= kWordsOfLine;
    const uint64_t count = is_line ? kWordsOfLine : 1;
    if (number++ % kCallerThreads == thread_index()) visit(i, count);
    i += count;
  }
}

template <class Value>
void write(char* first, uint64_t words, Value value) {
  for_each_piece(first, words, [&](uint64_t i, uint64_t count) {
    char* const at = first + i * sizeof(uint32_t);
    if (count == 1) {
      store_plain(reinterpret_cast<uint32_t*>(at), value(i));
    } else {
      store_line(at, {{value(i), value(i + 1), value(i + 2), value(i + 3)}});
    }
  });
}

class Schedule {
 public:
  Schedule(ProgramWorld& world, const Program& program, ProgramKernel kernel, uint64_t seed)
      : world_(world), machine_(world.machine()), program_(program), kernel_(kernel), random_(seed) {}

  Found run() {
    emulator::ScheduleParameters parameters = draw_schedule_parameters(program_.world, random_);
    is_dependent_ = random_.chance(128);
    // At least one block of each group runs at once (host/prepared_program.h).
    uint32_t& resident = parameters.scheduler.resident_threads;
    for (uint32_t i = 0; i < program_.size_count; ++i) {
      resident = std::max(resident, program_.groups * program_.sizes[i].threads);
    }
    first_call_ = random_.pick({0u, 1u, 65534u, 65535u});  // from call 65536 on the arrival counter exceeds 32 bits
    const uint32_t count = random_.between(3, 5);
    for (uint32_t i = 0; i < count; ++i) calls_.push_back(draw_call(program_, random_));
    world_.reset(random_.next(), parameters, first_call_);
    for (uint32_t rank = 0; rank < program_.world; ++rank) {
      for (uint32_t i = 0; i < count; ++i) enqueue(rank, i);
    }
    try {
      const Ending ending = machine_.run();
      if (ending != Ending::kDone) note(Failure::kUndefined, machine_.now(), 0, describe(ending, machine_));
    } catch (const std::exception& error) {
      note(Failure::kUndefined, machine_.now(), 0, error.what());
    }
    for (uint32_t rank = 0; rank < program_.world; ++rank) look_for_errors(rank);
    if (found_.failure == Failure::kNone) look_for_lines_not_reset();
    return found_;
  }

 private:
  // Keeps the earliest failure, because later ones may follow from it.
  bool note(Failure failure, uint64_t step, uint32_t rank, std::string text) {
    if (found_.failure != Failure::kNone && found_.step <= step) return false;
    found_ = {failure, step, rank, 0, 0, 0, std::move(text)};
    return true;
  }

  void enqueue(uint32_t rank, uint32_t number) {
    const ProgramCall& call = calls_[number];
    char* const input = world_.input(rank) + call.input_shift[rank];
    char* const output = call.is_in_place ? input : world_.output(rank) + call.output_shift[rank];
    const emulator::LaunchConfig caller{1, kCallerThreads, 0};
    machine_.launch(
        rank, caller,
        [this, rank, &call, input, output] {
          grid_dependency_wait();
          if (!call.is_in_place) write(output, call.expected[rank].size(), [](uint64_t) { return kScribble; });
          write(input, call.input[rank].size(), [&](uint64_t i) { return call.input[rank][i]; });
        },
        is_dependent_);
    const emulator::LaunchConfig grid{call.size.blocks, call.size.threads,
                                      std::max<uint64_t>(program_.shared_bytes, sizeof(Line))};
    ProgramArgs args = world_.arguments(rank, input, output, call.size.part_bytes);
    args.comm.takes_tickets = machine_.resident_blocks(grid) < grid.blocks;
    machine_.launch(rank, grid, [this, args] { kernel_(args); }, true);
    machine_.launch(
        rank, caller,
        [this, rank, number, input, output] {
          grid_dependency_wait();
          compare(rank, number, output);
          write(input, calls_[number].input[rank].size(), [](uint64_t) { return kScribble; });
        },
        is_dependent_);
  }

  void compare(uint32_t rank, uint32_t number, const char* output) {
    const ProgramCall& call = calls_[number];
    const std::vector<uint32_t>& expected = call.expected[rank];
    for_each_piece(const_cast<char*>(output), expected.size(), [&](uint64_t i, uint64_t count) {
      const char* const at = output + i * sizeof(uint32_t);
      Line line{};
      if (count == 1) {
        line.word[0] = load_plain(reinterpret_cast<const uint32_t*>(at));
      } else {
        line = load_line(at);
      }
      for (uint64_t j = 0; j < count; ++j) {
        if (line.word[j] == expected[i + j]) continue;
        if (!note(Failure::kResult, machine_.now(), rank,
                  "rank " + std::to_string(rank) + ", " + name(number) + ": element " + std::to_string(i + j) +
                      " of its output is " + hex(line.word[j]) +
                      (line.word[j] == kScribble ? ", as before the call" : "") + "; it must be " +
                      hex(expected[i + j]))) {
          return;
        }
        found_.element = i + j;
        found_.part_bytes = call.size.part_bytes;
      }
    });
  }

  std::string name(uint64_t number) const {
    const ProgramCall& call = calls_[number];
    return "call " + std::to_string(number + 1) + " of " + std::to_string(calls_.size()) + " (" +
           std::to_string(call.size.part_bytes / sizeof(uint32_t)) + " elements of a part, " +
           std::to_string(call.size.blocks) + " blocks of " + std::to_string(call.size.threads) + " threads" +
           (call.is_in_place ? ", in place)" : ")");
  }

  // Aborted waits. The first one names the rank it waited for; later ones may name the rank of its fault report.
  void look_for_errors(uint32_t rank) {
    const ErrorRecord& error = world_.mailbox(rank).error;
    if (error.complete == 0) return;
    // Waits of port channels do not know their call.
    const bool is_of_call = error.operation != static_cast<uint32_t>(OperationKind::kUser);
    const uint64_t number = is_of_call ? error.sequence - first_call_ : ~uint64_t{0};
    const std::string call = "rank " + std::to_string(rank) + (number < calls_.size() ? ", " + name(number) : "");
    const uint64_t step = machine_.memory().last_store(world_.aborted(rank));
    if (error.cause != static_cast<uint32_t>(ErrorCause::kTimeout)) {
      note(Failure::kUndefined, step, rank, call + ": it has no channel to rank " + std::to_string(error.peer));
      return;
    }
    const uint32_t noted = world_.note_of(rank);
    const uint32_t peer = noted == 0 ? error.peer : noted - 1;
    if (note(Failure::kWait, step, rank, call + ": its wait for rank " + std::to_string(peer) + " never ends")) {
      found_.peer = peer;
    }
  }

  void look_for_lines_not_reset() {
    for (uint32_t rank = 0; rank < program_.world; ++rank) {
      for (uint32_t i = 0; i < program_.sentinel_range_count; ++i) {
        const SentinelRange& range = program_.sentinel_ranges[i];
        for (uint64_t at = range.begin; at < range.end; at += sizeof(uint32_t)) {
          const auto* const word = reinterpret_cast<const uint32_t*>(world_.workspace(rank) + at);
          if (*word == kSentinel) continue;
          if (note(Failure::kNotReset, machine_.memory().last_store(word), rank,
                   "rank " + std::to_string(rank) + ": byte " + std::to_string(at) +
                       " of its workspace, the address of packets, is not reset to the sentinel when all calls have "
                       "ended")) {
            found_.element = at;
          }
        }
      }
    }
  }

  ProgramWorld& world_;
  emulator::Machine& machine_;
  const Program& program_;
  ProgramKernel kernel_;
  Random random_;
  uint64_t first_call_ = 0;
  bool is_dependent_ = false;  // the caller's grids use dependent launch
  std::vector<ProgramCall> calls_;
  Found found_;
};

}  // namespace

void explore(const Program& program, ProgramKernel kernel, uint64_t first_seed, uint32_t count, const char* trace,
             Outcome& outcome) {
  ProgramWorld world(program);
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(trace == nullptr ? nullptr : std::fopen(trace, "w"),
                                                       [](std::FILE* open) { return std::fclose(open); });
  world.machine().trace_to(file.get());
  outcome = {};
  while (outcome.failure == Failure::kNone && outcome.schedules < count) {
    outcome.seed = first_seed + outcome.schedules++;
    const Found found = Schedule(world, program, kernel, outcome.seed).run();
    outcome.failure = found.failure;
    outcome.step = found.step;
    outcome.rank = found.rank;
    outcome.peer = found.peer;
    outcome.element = found.element;
    outcome.part_bytes = found.part_bytes;
    outcome.steps = world.machine().now();
    outcome.fingerprint = world.machine().fingerprint();
    std::snprintf(outcome.text, sizeof(outcome.text), "%s", found.text.c_str());
  }
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
