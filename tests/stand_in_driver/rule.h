// What would be undefined, or wait without a limit, in the driver ends a program of the tests with a word.
#pragma once

#include <cstdio>
#include <cstdlib>

inline void rule(bool holds, const char* what) {
  if (holds) return;
  std::printf("BROKEN RULE: %s\n", what);
  std::fflush(stdout);
  std::exit(3);
}
