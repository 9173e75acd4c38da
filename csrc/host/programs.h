// Programs: the DSL kernels that a core has loaded, and the names of operations in errors. Used by CoreImpl.
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

// Thread-safe, because the watchdog asks for names.
template <class Launcher>
class Programs {
 public:
  using Function = typename Launcher::template Function<ProgramArgs>;

  // Loads a DSL kernel with load() and returns its number. A failed load uses up a number, so the numbers of all ranks
  // agree.
  template <class Load>
  uint32_t add(const Load& load, const std::string& title) {
    const uint32_t number = take_number(title);
    Function function = load();
    const std::lock_guard<std::mutex> lock(mutex_);
    loaded_[number].function = std::move(function);
    return number;
  }

  // References stay valid. Throws std::invalid_argument for an unknown number.
  const Function& function(uint32_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number >= loaded_.size() || !loaded_[number].function) {
      throw std::invalid_argument("there is no program " + std::to_string(number));
    }
    return *loaded_[number].function;
  }

  // Name of any operation, the library's own included.
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
