#include "operands.h"

namespace drill {

// "" or where bytes are not as they were at first.
std::string touched_in(const char* first, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (first[i] != kUntouched) return "byte " + std::to_string(i) + " has been written";
  }
  return "";
}

}  // namespace drill
