// The kernels of llm_comm.dsl that a core has loaded, and what operations are called in errors.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/describe.h"
#include "host/prepared_program.h"

namespace llm_comm::host {

// Any thread may ask: the watchdog does, for titles.
template <class Launcher>
class Programs {
 public:
  using Function = typename Launcher::template Function<ProgramArgs>;

  // Loads a program by load(), and returns its number. Numbers count attempts: ranks on which one fails stay in step with the others.
  template <class Load>
  uint32_t add(const Load& load, const std::string& title) {
    const uint32_t number = take_number(title);
    Function function = load();
    const std::lock_guard<std::mutex> lock(mutex_);
    loaded_[number].function = std::move(function);
    return number;
  }

  // What has been loaded stays where it is. Throws std::invalid_argument for a number that no program has.
  const Function& function(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number >= loaded_.size() || !loaded_[number].function) {
      throw std::invalid_argument("there is no program " + std::to_string(number));
    }
    return *loaded_[number].function;
  }

  // Of any operation, the library's own included.
  std::string title(uint32_t kind) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_program = kind >= kFirstProgramKind && kind - kFirstProgramKind < loaded_.size();
    return is_program ? loaded_[kind - kFirstProgramKind].title : operation_title(kind);
  }

 private:
  struct Program {
    std::optional<Function> function;
    std::string title;
  };

  uint32_t take_number(const std::string& title) {
    const std::lock_guard<std::mutex> lock(mutex_);
    loaded_.push_back({std::nullopt, title});
    return static_cast<uint32_t>(loaded_.size() - 1);
  }

  mutable std::mutex mutex_;
  std::deque<Program> loaded_;
};

}  // namespace llm_comm::host
