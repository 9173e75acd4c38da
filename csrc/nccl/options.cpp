#include "nccl/options.h"

#include <strings.h>

#include <cmath>
#include <cstdlib>

#include "nccl/failure.h"

namespace llm_comm::nccl {

namespace {

[[noreturn]] void refuse(const char* name, const std::string& text, const char* valid) {
  throw Failure(ncclInvalidArgument,
                std::string(name) + "=" + text.substr(0, 100) + " is not allowed; valid: " + valid);
}

bool boolean(const char* name, const std::string& text) {
  for (const char* const yes : {"1", "true", "on", "yes"}) {
    if (strcasecmp(text.c_str(), yes) == 0) return true;
  }
  for (const char* const no : {"0", "false", "off", "no"}) {
    if (strcasecmp(text.c_str(), no) == 0) return false;
  }
  refuse(name, text, "1 or 0");
}

double seconds(const char* name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(value > 0 && value < 1e6)) {
    refuse(name, text, "a number of seconds above 0 and below 1000000");
  }
  return value;
}

// Parses a size; 64M is 64 MiB.
uint64_t size(const char* name, const std::string& text) {
  constexpr const char* kValid = "bytes, 1 MiB to 4 GiB (64M is 64 MiB)";
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  std::string unit = end;
  if (end == text.c_str() || !std::isfinite(number)) refuse(name, text, kValid);
  if (!unit.empty() && (unit.back() == 'B' || unit.back() == 'b')) unit.pop_back();
  if (!unit.empty() && (unit.back() == 'i')) unit.pop_back();
  double factor = 1;
  if (strcasecmp(unit.c_str(), "K") == 0) {
    factor = 1 << 10;
  } else if (strcasecmp(unit.c_str(), "M") == 0) {
    factor = 1 << 20;
  } else if (strcasecmp(unit.c_str(), "G") == 0) {
    factor = 1 << 30;
  } else if (!unit.empty()) {
    refuse(name, text, kValid);
  }
  const double bytes = number * factor;
  constexpr double kLeast = 1 << 20;
  if (!(bytes >= kLeast && bytes <= 4096 * kLeast)) refuse(name, text, kValid);
  return static_cast<uint64_t>(bytes);
}

}  // namespace

std::string Options::digest() const {
  return "timeout_s " + std::to_string(timeout_s) + ", workspace_bytes " + std::to_string(workspace_bytes) + ", pdl " +
         std::to_string(pdl) + ", debug " + std::to_string(debug) + ", share_gpu " + std::to_string(share_gpu);
}

Options read_options(const std::function<const char*(const char*)>& variable) {
  Options options;
  const auto read = [&](const char* name, auto take) {
    const char* const text = variable(name);
    if (text == nullptr || *text == '\0') return;
    try {
      take(name, std::string(text));
    } catch (const Failure& failure) {
      options.objection = failure.what();
    }
  };
  read("LLM_COMM_ENABLE", [&](const char* name, const std::string& text) { options.enable = boolean(name, text); });
  read("LLM_COMM_TIMEOUT_S",
       [&](const char* name, const std::string& text) { options.timeout_s = seconds(name, text); });
  read("LLM_COMM_WORKSPACE_BYTES",
       [&](const char* name, const std::string& text) { options.workspace_bytes = size(name, text); });
  read("LLM_COMM_PDL", [&](const char* name, const std::string& text) { options.pdl = boolean(name, text); });
  read("LLM_COMM_DEBUG", [&](const char* name, const std::string& text) { options.debug = boolean(name, text); });
  read("LLM_COMM_SHARE_GPU",
       [&](const char* name, const std::string& text) { options.share_gpu = boolean(name, text); });
  read("LLM_COMM_TABLE", [&](const char*, const std::string& text) { options.table = text; });
  return options;
}

Options options_of_process() {
  return read_options([](const char* name) { return std::getenv(name); });
}

}  // namespace llm_comm::nccl
