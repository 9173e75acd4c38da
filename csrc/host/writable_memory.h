// Tests whether this process can write to an address of its own. The Python package checks CPU tensors with it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <initializer_list>

namespace llm_comm::host {

// Returns false if a store to the first or the last byte would raise SIGSEGV. Lets the Linux kernel do an atomic "or 0"
// at both (FUTEX_WAKE_OP), which changes nothing. Returns true where that call is unavailable.
inline bool is_writable(uint64_t address, uint64_t bytes) noexcept {
  if (bytes == 0) return true;
  for (const uint64_t byte : {address, address + bytes - 1}) {
    uint32_t unused = 0;  // no thread waits on it
    const uint64_t word = byte & ~uint64_t{3};
    const long done = syscall(SYS_futex, &unused, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 0, nullptr, word,
                              FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, 0));
    if (done < 0 && errno == EFAULT) return false;
  }
  return true;
}

}  // namespace llm_comm::host
