#include "schedule.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "calls.h"
#include "schedules/schedule_parameters.h"
#include "world.h"

namespace drill {

namespace {

using emulator::Ending;
using emulator::ScheduleParameters;
using emulator::Stall;

// Worlds with kernels of their own, or with `--large` some of those that share a kernel (ranks.cuh).
const std::vector<uint32_t> kSmallWorlds = {2, 3, 4, 5, 6, 7, 8};
const std::vector<uint32_t> kLargeWorlds = {9, 12, kMaxWorldSize};

// ---- What the schedule is about ------------------------------------------------------------------------------------

// Neighbouring seeds go through all subjects and worlds in turn.
struct Case {
  Subject subject;
  uint32_t ranks;
};

Case choose_case(uint64_t seed, const std::string& algorithm, const std::vector<uint32_t>& worlds) {
  std::vector<Subject> wanted;
  for (const NamedSubject& named : subjects()) {
    if (algorithm.empty() || algorithm == named.name) wanted.push_back(named.subject);
  }
  if (wanted.empty()) {
    std::string names;
    for (const std::string& name : subject_names()) names += (names.empty() ? "" : ", ") + name;
    throw std::invalid_argument("there is no algorithm '" + algorithm + "'; there are " + names);
  }
  return {wanted[seed / worlds.size() % wanted.size()], worlds[seed % worlds.size()]};
}

// ---- How the schedule goes -----------------------------------------------------------------------------------------

// Of a rank that comes too late.
constexpr uint64_t kLateSteps = 3 * kTimeoutNs;

// What befalls one rank, beyond what the others may wait for.
struct Mishap {
  uint32_t rank;
  bool for_ever;
  // Another one that comes too late, though before the first. Its host aborts it, as a watchdog does that has heard of
  // an error elsewhere.
  std::optional<uint32_t> aborted;
  uint64_t abort_time;
  // The hosts of the others learn that its process has exited, so many steps after it has stopped.
  std::optional<uint64_t> seen_after;
  // The rank is not late: its communicator ends on the device while it begins the call of this number, as it does where
  // another block gives up at that moment. Threads of one block find out or not.
  std::optional<uint32_t> broken_call;

  // Whether this rank has failed without a record that says why.
  bool is_silent(uint32_t which) const { return which == aborted || (broken_call && which == rank); }
};

// One of the accesses that the rank makes where nothing befalls it: a stall changes nothing before it begins. Early,
// blocks begin; late, some ranks need the others no more; most accesses in between are polls.
enum class When { kEarly, kLate, kAnyTime };

uint64_t draw_access(uint64_t accesses, When when, Random& random) {
  const auto last = static_cast<uint32_t>(accesses);
  if (last == 0) return 1;
  switch (when) {
    case When::kEarly:
      return random.between(1, std::min(last, 1u << random.below(11)));
    case When::kLate:
      return random.between(last - last / 4, last);
    default:
      return random.between(1, last);
  }
}

// `machine`: has run the schedule without it.
Mishap draw_mishap(uint32_t ranks, const emulator::Machine& machine, Random& random, ScheduleParameters& parameters) {
  Mishap mishap{random.below(ranks), random.chance(128), std::nullopt, 0, std::nullopt, std::nullopt};
  if (!mishap.for_ever && random.chance(128)) {
    mishap.broken_call = random.below(2);
    return mishap;
  }
  const When when = random.pick({When::kEarly, When::kEarly, When::kLate, When::kAnyTime});
  const auto stall = [&](uint32_t rank, uint64_t steps) {
    parameters.stalls.push_back({rank, draw_access(machine.accesses(rank), when, random), steps});
  };
  stall(mishap.rank, mishap.for_ever ? Stall::kForever : kLateSteps);
  if (mishap.for_ever && random.chance(128)) mishap.seen_after = random.below(kTimeoutNs / 2);
  if (!mishap.for_ever && random.chance(128)) {
    mishap.aborted = (mishap.rank + random.between(1, ranks - 1)) % ranks;
    mishap.abort_time = random.between(1, 2 * kTimeoutNs);
    stall(*mishap.aborted, 2 * kTimeoutNs);
  }
  return mishap;
}

// How often a host looks whether another rank has stopped.
constexpr uint64_t kLookSteps = kTimeoutNs / 64;

// From now on, until it has been seen that the process of `rank` has exited.
void watch_for_exit(emulator::Machine& machine, World& world, uint32_t rank, uint64_t seen_after) {
  const std::optional<uint64_t> stopped = machine.stalled_at(rank);
  if (!stopped || machine.now() < *stopped + seen_after) {
    machine.at(machine.now() + kLookSteps, [&machine, &world, rank, seen_after] {  //
      watch_for_exit(machine, world, rank, seen_after);
    });
    return;
  }
  for (uint32_t other = 0; other < world.ranks(); ++other) {
    if (other != rank) world.core(other).peer_exited(static_cast<int>(rank));
  }
}

// Ends the communicator of a rank on its device, beside the grid that is enqueued last, if that has triggered.
void break_off(World& world, uint32_t rank) {
  const DeviceComm comm = world.device_comm(rank);
  world.launch(rank, {1, 1, 0}, [comm] { abort_communicator(bounds_of(comm)); });
}

// Where the numbers of operations start: at 0, or shortly before a counter's low half or the whole of it wraps.
uint64_t draw_first_operation(Random& random) {
  const uint64_t wraps[] = {(uint64_t{1} << 32) / kArrivalsPerOperation, ~uint64_t{0} / kArrivalsPerOperation + 1};
  if (random.chance(128)) return random.below(2);
  return wraps[random.below(2)] - random.below(5);
}

// ---- What has to hold afterwards -----------------------------------------------------------------------------------

std::string describe(const host::OperationError& error) {
  const std::string operation = error.operation + " " + std::to_string(error.sequence);
  const std::string peer = " rank " + std::to_string(error.peer);
  if (error.cause != "timeout") return error.cause + " in " + operation + " with" + peer;
  return "a wait of " + operation + " for" + peer + " expired";
}

constexpr uint64_t kAll = ~uint64_t{0};

// Of calls that take no more than `operations` operations together. Message passing takes none: where that is a bound,
// its results are not looked at, as its kernels do not ask whether the communicator has failed.
std::string wrong_result(const std::vector<std::unique_ptr<Call>>& calls, uint32_t rank, uint64_t operations = kAll) {
  uint64_t left = operations;
  for (size_t i = 0; i < calls.size() && calls[i]->operations() <= left; ++i) {
    left -= calls[i]->operations();
    if (operations != kAll && calls[i]->operations() == 0) continue;
    const std::string wrong = calls[i]->wrong(rank);
    if (!wrong.empty()) {
      return "rank " + std::to_string(rank) + ", call " + std::to_string(i) + " (" + calls[i]->name() + "): " + wrong;
    }
  }
  return "";
}

// Of calls that begin behind operation number `operations`, with which the rank's communicator ended.
std::string written_after_the_end(const std::vector<std::unique_ptr<Call>>& calls, uint32_t rank, uint64_t operations) {
  uint64_t first = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string touched = first > operations ? calls[i]->touched(rank) : "";
    if (!touched.empty()) {
      return "rank " + std::to_string(rank) + ", call " + std::to_string(i) + " (" + calls[i]->name() + "): " + touched;
    }
    first += calls[i]->operations();
  }
  return "";
}

// No rank has an error, all results are right, all lines are reset and all operations counted. `but`: not on this one.
std::string check_all_right(World& world, const std::vector<std::unique_ptr<Call>>& calls,
                            std::optional<uint32_t> but = std::nullopt) {
  uint64_t operations = 0;
  for (const auto& call : calls) operations += call->operations();
  for (uint32_t rank = 0; rank < world.ranks(); ++rank) {
    if (rank == but) continue;
    if (const auto error = world.core(rank).error()) return "rank " + std::to_string(rank) + ": " + describe(*error);
    std::string wrong = wrong_result(calls, rank);
    if (wrong.empty()) wrong = world.not_reset(rank);
    if (!wrong.empty()) return wrong;
    if (world.operations_counted(rank) != operations) {
      return "rank " + std::to_string(rank) + " counted " + std::to_string(world.operations_counted(rank)) +
             " operations of " + std::to_string(operations);
    }
    if (world.order(rank).has_overlap() || !world.order(rank).is_settled()) {
      return "rank " + std::to_string(rank) + " counted operations that had one number";
    }
    if (rank != 0 && world.order(rank).differs_from(world.order(0))) {
      return "rank " + std::to_string(rank) + " counted operations in another order than rank 0";
    }
  }
  return "";
}

// The first call whose sizes are wrong, or nullptr. `only`: so that this rank has to find out.
const Call* find_wrong_sizes(const World& world, const std::vector<std::unique_ptr<Call>>& calls,
                             std::optional<uint32_t> only = std::nullopt) {
  for (const auto& call : calls) {
    for (uint32_t rank = 0; rank < world.ranks(); ++rank) {
      if ((!only || rank == *only) && call->must_fail(rank)) return call.get();
    }
  }
  return nullptr;
}

// Ranks that must find out that sizes are wrong have that error, and stored nothing behind it. The others may end in
// time, or wait for one that has failed.
std::string check_wrong_sizes(World& world, const std::vector<std::unique_ptr<Call>>& calls, const Call& wrong) {
  for (uint32_t rank = 0; rank < world.ranks(); ++rank) {
    const std::string who = "rank " + std::to_string(rank) + ": ";
    const auto error = world.core(rank).error();
    const bool must_fail = wrong.must_fail(rank);
    if (!error) {
      if (must_fail) return who + "sizes in " + wrong.name() + " are wrong, and it has no error";
      const std::string result = wrong_result(calls, rank);
      if (!result.empty()) return "without an error on " + result;
      continue;
    }
    const auto named = static_cast<uint32_t>(error->peer);
    // A rank that has not failed in this call may do so in a later one.
    const bool is_right = must_fail ? error->cause == "sizes" && wrong.must_fail(named)
                                    : world.core(named).error() && (error->cause == "timeout" ||
                                                                    find_wrong_sizes(world, calls, rank) != nullptr);
    if (!is_right) return who + describe(*error);
    const uint64_t ended = world.operations_before(error->sequence);
    const std::string result = wrong_result(calls, rank, ended);
    if (!result.empty()) return "before the error of " + result;
    const std::string written = written_after_the_end(calls, rank, ended);
    if (!written.empty()) return "behind the error of " + written;
  }
  return "";
}

// How long ranks may go on after one has stopped. After a death, until a wait for it has expired (17 sixteenths of
// kTimeoutNs with the time for notes): nobody begins another one then. One that comes too late finds notes of the
// others, if they failed, and waits for nobody. The rest is for what they do before they wait. Nothing expires where
// the hosts see in time that the process has exited.
uint64_t longest_after(const Mishap& mishap) {
  constexpr uint64_t kOtherSteps = kTimeoutNs / 4;
  // One that comes too late is alone, and time is let pass at each of its waits (Machine). Messages have one in every
  // block of every call, one after the other where blocks have to take turns. A wait for somebody would take
  // kTimeoutNs.
  constexpr uint64_t kStepsAlone = kTimeoutNs * 5 / 8;
  if (!mishap.for_ever) return kLateSteps + kStepsAlone;
  return mishap.seen_after ? *mishap.seen_after + kOtherSteps : kTimeoutNs + kOtherSteps;
}

uint32_t count_failed(World& world) {
  uint32_t failed = 0;
  for (uint32_t rank = 0; rank < world.ranks(); ++rank) failed += world.core(rank).error() ? 1 : 0;
  return failed;
}

// Where no rank has failed, all is as if nothing had happened. Else, a rank without an error has right results, the one
// that came too late too, but not one that failed without a record; one with an error names one that was missing, and
// has right results of what it ended before, and has written nothing in calls behind it.
std::string check_mishap(World& world, const std::vector<std::unique_ptr<Call>>& calls, const Mishap& mishap) {
  const std::optional<uint64_t> stopped = world.machine().stalled_at(mishap.rank);
  const bool died = stopped && mishap.for_ever;
  if (stopped && !mishap.aborted && world.machine().now() > *stopped + longest_after(mishap)) {
    return "ranks went on for " + std::to_string(world.machine().now() - *stopped) + " steps after one had stopped";
  }
  if (count_failed(world) == 0 && !mishap.aborted && !mishap.broken_call) {
    const std::string wrong = check_all_right(world, calls, died ? std::optional(mishap.rank) : std::nullopt);
    return wrong.empty() ? "" : "though nobody failed, " + wrong;
  }
  for (uint32_t rank = 0; rank < world.ranks(); ++rank) {
    if (rank == mishap.rank && mishap.for_ever) continue;
    const auto error = world.core(rank).error();
    if (!error) {
      const std::string wrong = mishap.is_silent(rank) ? "" : wrong_result(calls, rank);
      if (!wrong.empty()) return "without an error on " + wrong;
      continue;
    }
    const bool saw_exit = mishap.seen_after && error->cause == "peer exited";
    if (error->cause != "timeout" && !saw_exit) return "rank " + std::to_string(rank) + ": " + describe(*error);
    const auto named = static_cast<uint32_t>(error->peer);
    // Messages go between two at a time, one after the other where blocks take turns: who waits for a rank that waits
    // for the missing one may have begun to wait long before it. Such a rank has failed too. And a rank may have ended
    // all its messages (R1 is not for them), and so left no note, when others wait for one that breaks off in silence.
    const bool is_in_chain =
        error->operation == "user kernel" && (world.core(named).error() || mishap.broken_call.has_value());
    if (rank != mishap.rank && rank != mishap.aborted && named != mishap.rank && named != mishap.aborted &&
        !is_in_chain) {
      return "rank " + std::to_string(rank) + " blames the wrong one: " + describe(*error);
    }
    if (error->operation == "user kernel") continue;  // may have no number
    const uint64_t ended = world.operations_before(error->sequence);
    const std::string wrong = wrong_result(calls, rank, ended);
    if (!wrong.empty()) return "before the error of " + wrong;
    const std::string written = written_after_the_end(calls, rank, ended);
    if (!written.empty()) return "behind the error of " + written;
  }
  return "";
}

}  // namespace

std::vector<std::string> subject_names() {
  std::vector<std::string> names;
  for (const NamedSubject& named : subjects()) {
    if (names.empty() || names.back() != named.name) names.push_back(named.name);
  }
  return names;
}

namespace {

// What the ranks do, and the world that they do it in. Made anew for each run: calls may overwrite their inputs.
struct Run {
  World world;
  std::vector<std::unique_ptr<Call>> calls;
  Ending ending;
};

struct Script {
  Case chosen;
  bool alone;
  uint64_t first_operation;
  bool check_calls;
  const gcn::MachineCode* machine_code;
  uint64_t machine_seed;
  Random calls;

  std::unique_ptr<Run> run(emulator::Machine& machine, const ScheduleParameters& parameters,
                           const std::optional<Mishap>& mishap) const {
    std::unique_ptr<Run> run(
        new Run{World(machine, chosen.ranks, first_operation, check_calls, machine_code), {}, Ending::kDone});
    machine.reset(machine_seed, chosen.ranks, parameters);
    if (mishap && mishap->aborted) {
      machine.at(mishap->abort_time, [&world = run->world, rank = *mishap->aborted] { world.core(rank).abort(); });
    }
    if (mishap && mishap->seen_after) {
      machine.at(0, [&machine, &world = run->world, rank = mishap->rank, after = *mishap->seen_after] {
        watch_for_exit(machine, world, rank, after);
      });
    }
    Random random = calls;
    const uint32_t count = random.between(1, random.pick({2u, 4u, 6u}));
    for (uint32_t i = 0; i < count; ++i) {
      const Call* const before = i == 0 ? nullptr : run->calls.back().get();
      run->calls.push_back(draw_call(chosen.subject, alone, i, chosen.ranks, random, before));
    }
    for (uint32_t rank = 0; rank < chosen.ranks; ++rank) {
      for (uint32_t i = 0; i < count; ++i) {
        run->calls[i]->enqueue(run->world, rank);
        if (mishap && rank == mishap->rank && i == mishap->broken_call) break_off(run->world, rank);
      }
    }
    run->ending = machine.run();
    return run;
  }
};

std::string failure(Run& run, const emulator::Machine& machine, const std::optional<Mishap>& mishap) {
  if (run.ending != Ending::kDone) return schedules::describe(run.ending, machine);
  const Call* const wrong = find_wrong_sizes(run.world, run.calls);
  if (wrong != nullptr) return check_wrong_sizes(run.world, run.calls, *wrong);
  return mishap ? check_mishap(run.world, run.calls, *mishap) : check_all_right(run.world, run.calls);
}

MishapOutcome outcome(World& world) {
  const uint32_t failed = count_failed(world);
  if (failed == 0) return MishapOutcome::kNobodyFailed;
  return failed + 1 < world.ranks() ? MishapOutcome::kSomeFailed : MishapOutcome::kAllFailed;
}

}  // namespace

Result run_schedule(emulator::Machine& machine, uint64_t seed, const Options& options) {
  const std::vector<uint32_t> only = {options.ranks};
  const std::vector<uint32_t>& worlds = options.ranks != 0 ? only : options.large ? kLargeWorlds : kSmallWorlds;
  const Case chosen = choose_case(seed, options.algorithm, worlds);
  Random random(seed);
  ScheduleParameters parameters = schedules::draw_schedule_parameters(chosen.ranks, random);
  parameters.memory.grid_end_performs = options.grid_end_performs;
  const uint64_t first_operation = draw_first_operation(random);
  const bool check_calls = random.chance(48);
  const Script script{chosen,        options.alone,        first_operation, check_calls, options.machine_code,
                      random.next(), Random(random.next())};

  Result result{};
  result.description = std::to_string(chosen.ranks) + " ranks";
  std::unique_ptr<Run> run = script.run(machine, parameters, std::nullopt);
  result.failure = failure(*run, machine, std::nullopt);
  const bool is_right = find_wrong_sizes(run->world, run->calls) == nullptr;
  if (result.failure.empty() && random.chance(options.mishaps ? 256 : 24) && is_right) {
    const Mishap mishap = draw_mishap(chosen.ranks, machine, random, parameters);
    result.description += ", rank " + std::to_string(mishap.rank) +
                          (mishap.seen_after    ? " exits"
                           : mishap.for_ever    ? " dies"
                           : mishap.broken_call ? " breaks off"
                                                : " stalls");
    if (mishap.aborted) result.description += ", rank " + std::to_string(*mishap.aborted) + " is aborted";
    run = script.run(machine, parameters, mishap);
    result.failure = failure(*run, machine, mishap);
    result.mishap = outcome(run->world);
  }
  if (check_calls) result.description += ", calls checked";
  for (const auto& call : run->calls) result.description += "; " + call->name();
  result.steps = machine.now();
  result.fingerprint = machine.fingerprint();
  return result;
}

emulator::Machine make_machine() { return emulator::Machine(kMaxWorldSize, kBytesOfRank, kTimeoutNs / 256); }

}  // namespace drill
