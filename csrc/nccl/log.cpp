#include "nccl/log.h"

#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace llm_comm::nccl {

namespace {

enum class Level { kNone, kWarn, kInfo };

Level level() {
  static const Level chosen = [] {
    const char* const text = std::getenv("LLM_COMM_NCCL_DEBUG");
    if (text == nullptr || *text == '\0') return Level::kWarn;
    if (strcasecmp(text, "INFO") == 0) return Level::kInfo;
    return strcasecmp(text, "NONE") == 0 ? Level::kNone : Level::kWarn;
  }();
  return chosen;
}

// Uses one write, so that lines of several ranks do not mix.
void print(const char* what, const std::string& line) {
  const std::string whole = "llm_comm-nccl [" + std::to_string(getpid()) + "] " + what + " " + line + "\n";
  std::fwrite(whole.data(), 1, whole.size(), stderr);
}

thread_local char last_error_of_thread[1024];

}  // namespace

bool is_informing() { return level() == Level::kInfo; }

void inform(const std::string& line) {
  if (is_informing()) print("INFO", line);
}

void warn(const std::string& line) {
  if (level() != Level::kNone) print("WARN", line);
}

void set_last_error(const std::string& text) noexcept {
  const size_t length = std::min(text.size(), sizeof(last_error_of_thread) - 1);
  std::memcpy(last_error_of_thread, text.data(), length);
  last_error_of_thread[length] = '\0';
}

const char* last_error() noexcept { return last_error_of_thread; }

}  // namespace llm_comm::nccl
