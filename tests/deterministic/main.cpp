// Runs seeded schedules of the emulator. Exit status: 0 all as promised, 1 a failure, 2 wrong usage.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "schedule.h"

namespace {

constexpr const char* kUsage =
    "usage: deterministic [--seed N] [--cases N] [--seconds T] [--algorithm NAME] [--replay SEED] [--trace FILE]\n"
    "                     [--alone] [--mishaps] [--unordered-grids] [--large] [--ranks N] [--list]\n"
    "                     [--machine-code FILE]\n"
    "  --seed N          the first seed (1); schedule i has seed N + i\n"
    "  --cases N         how many schedules (1000)\n"
    "  --seconds T       as many schedules as fit into T seconds, instead of --cases\n"
    "  --algorithm NAME  only schedules about one of those that --list prints\n"
    "  --alone           no calls but those that a schedule is about\n"
    "  --replay SEED     one schedule, with a description; give the same options as in the run that failed\n"
    "  --trace FILE      writes every access of the schedules; the same seed gives the same bytes\n"
    "  --mishaps         in every schedule a rank dies or comes too late, not in some\n"
    "  --unordered-grids the end of a grid orders no stores beyond its own GPU (see weak_memory.h)\n"
    "  --large           worlds of 9, 12 and 16 ranks, in place of 2 to 8\n"
    "  --ranks N         worlds of N ranks\n"
    "  --machine-code FILE  kernels in assembly text for AMD's GPUs, which run in place of the emulated ones; may be "
    "given\n"
    "                    again. Needs a build with LLM_COMM_LIKE_AMD\n"
    "  --list            prints what schedules may be about\n";

struct Arguments {
  uint64_t seed = 1;
  uint64_t cases = 1000;
  double seconds = 0;
  bool replay = false;
  bool list = false;
  const char* trace = nullptr;
  drill::Options options;
  std::vector<std::string> machine_code;
};

bool parse(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--unordered-grids") {
      arguments.options.grid_end_performs = false;
      continue;
    }
    if (option == "--alone") {
      arguments.options.alone = true;
      continue;
    }
    if (option == "--list") {
      arguments.list = true;
      continue;
    }
    if (option == "--large") {
      arguments.options.large = true;
      continue;
    }
    if (option == "--mishaps") {
      arguments.options.mishaps = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const char* const value = argv[++i];
    if (option == "--seed") {
      arguments.seed = std::strtoull(value, nullptr, 0);
    } else if (option == "--cases") {
      arguments.cases = std::strtoull(value, nullptr, 0);
    } else if (option == "--seconds") {
      arguments.seconds = std::strtod(value, nullptr);
    } else if (option == "--algorithm") {
      arguments.options.algorithm = value;
    } else if (option == "--replay") {
      arguments.seed = std::strtoull(value, nullptr, 0);
      arguments.cases = 1;
      arguments.replay = true;
    } else if (option == "--ranks") {
      arguments.options.ranks = static_cast<uint32_t>(std::strtoul(value, nullptr, 0));
      if (arguments.options.ranks < 2 || arguments.options.ranks > llm_comm::kMaxWorldSize) return false;
    } else if (option == "--machine-code") {
      arguments.machine_code.push_back(value);
    } else if (option == "--trace") {
      arguments.trace = value;
    } else {
      return false;
    }
  }
  return true;
}

void print_failure(const Arguments& arguments, const char* program, uint64_t seed, uint64_t schedules,
                   const drill::Result& result) {
  const auto number = static_cast<unsigned long long>(seed);
  std::printf("FAILED: seed %llu (schedule %llu of this run): %s\n  %s\n", number,
              static_cast<unsigned long long>(schedules), result.failure.c_str(), result.description.c_str());
  std::string options;
  if (!arguments.options.algorithm.empty()) options += " --algorithm " + arguments.options.algorithm;
  if (arguments.options.alone) options += " --alone";
  if (!arguments.options.grid_end_performs) options += " --unordered-grids";
  if (arguments.options.mishaps) options += " --mishaps";
  if (arguments.options.large) options += " --large";
  if (arguments.options.ranks != 0) options += " --ranks " + std::to_string(arguments.options.ranks);
  for (const std::string& path : arguments.machine_code) options += " --machine-code " + path;
  std::printf("  replay: %s --replay %llu%s\n", program, number, options.c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  if (arguments.list) {
    for (const std::string& name : drill::subject_names()) std::printf("%s\n", name.c_str());
    return 0;
  }
  gcn::MachineCode machine_code;
  for (const std::string& path : arguments.machine_code) machine_code.add(path);
  if (!arguments.machine_code.empty()) {
    if (llm_comm::kWarpThreads != gcn::kLanes) throw std::invalid_argument("machine code has warps of 64 threads");
    arguments.options.machine_code = &machine_code;
  }
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  std::FILE* const trace = arguments.trace != nullptr ? std::fopen(arguments.trace, "w") : nullptr;
  if (arguments.trace != nullptr && trace == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", arguments.trace);
    return 2;
  }
  llm_comm::emulator::Machine machine = drill::make_machine();
  machine.trace_to(trace);
  uint64_t schedules = 0;
  uint64_t steps = 0;
  unsigned long long mishaps[4] = {};  // by MishapOutcome
  bool failed = false;
  while (!failed && (arguments.seconds > 0 ? elapsed() < arguments.seconds : schedules < arguments.cases)) {
    const uint64_t seed = arguments.seed + schedules++;
    const drill::Result result = drill::run_schedule(machine, seed, arguments.options);
    steps += result.steps;
    ++mishaps[static_cast<int>(result.mishap)];
    failed = !result.failure.empty();
    if (failed) print_failure(arguments, argv[0], seed, schedules, result);
    if (arguments.replay) {
      std::printf("seed %llu: %s\n  %llu steps, fingerprint %016llx: %s\n", static_cast<unsigned long long>(seed),
                  result.description.c_str(), static_cast<unsigned long long>(result.steps),
                  static_cast<unsigned long long>(result.fingerprint), failed ? "failed" : "as promised");
    }
  }
  if (trace != nullptr) std::fclose(trace);
  if (!arguments.replay) {
    std::printf("%llu schedules, %llu steps, %.1f s: %s\n", static_cast<unsigned long long>(schedules),
                static_cast<unsigned long long>(steps), elapsed(), failed ? "failed" : "as promised");
    if (!arguments.machine_code.empty()) {
      std::printf("%llu of %llu grids ran as machine code\n", static_cast<unsigned long long>(machine_code.launches),
                  static_cast<unsigned long long>(machine_code.grids));
    }
    std::printf("mishaps after which nobody failed: %llu, some did: %llu, all but one at most: %llu\n", mishaps[1],
                mishaps[2], mishaps[3]);
  }
  return failed ? 1 : 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
