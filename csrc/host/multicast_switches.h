// Environment variables that forbid NVLink multicast. The cores check them before they look up a driver function for
// multicast: on a machine that forbids it, even a failed attempt may do harm.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace llm_comm::host {

// A variable that can switch multicast off, and its usual value for that.
struct MulticastSwitch {
  const char* variable;
  const char* off;
};
inline constexpr MulticastSwitch kMulticastSwitches[] = {{"LLM_COMM_MULTICAST", "0"},
                                                         {"NCCL_NVLS_ENABLE", "0"},
                                                         {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"},
                                                         {"NVSHMEM_DISABLE_NVLS", "1"}};

// Interprets a value as a number or a word, as other programs do. A value that is neither forbids multicast.
inline bool permits_multicast(const MulticastSwitch& of, const char* value) {
  std::string text(value);
  const auto is_blank = [](unsigned char c) { return std::isspace(c) != 0; };
  text.erase(std::remove_if(text.begin(), text.end(), is_blank), text.end());
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  if (text.empty()) return true;  // a compose file may set an empty value instead of none
  const auto is_one_of = [&](std::initializer_list<const char*> words) {
    return std::find(words.begin(), words.end(), text) != words.end();
  };
  const bool is_number = std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  const bool is_zero = is_number && text.find_first_not_of('0') == std::string::npos;
  if (std::string(of.off) == "1") return is_zero || is_one_of({"false", "off", "no", "n", "f"});
  return (is_number && !is_zero) || is_one_of({"auto", "true", "on", "yes", "y", "t"});
}

// "NAME=value" of the first variable that forbids multicast, or "". `get(name)`: its value, or nullptr.
template <class Get>
std::string multicast_switched_off(Get get) {
  for (const MulticastSwitch& one : kMulticastSwitches) {
    const char* const value = get(one.variable);
    if (value != nullptr && !permits_multicast(one, value)) return std::string(one.variable) + "=" + value;
  }
  return "";
}

// Throws std::runtime_error if multicast is switched off. The core calls it even if its caller has checked already.
template <class Get>
void require_multicast_permitted(Get get) {
  const std::string by = multicast_switched_off(get);
  if (!by.empty()) throw std::runtime_error("NVLink multicast is switched off by " + by);
}

inline const char* variable_of_process(const char* name) { return std::getenv(name); }

}  // namespace llm_comm::host
