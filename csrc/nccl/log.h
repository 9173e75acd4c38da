// Log lines on stderr, controlled by LLM_COMM_NCCL_DEBUG, and the last error of a thread.
#pragma once

#include <string>

namespace llm_comm::nccl {

// True if LLM_COMM_NCCL_DEBUG is INFO.
bool is_informing();
void inform(const std::string& line);
// Prints unless LLM_COMM_NCCL_DEBUG is NONE.
void warn(const std::string& line);

// Text that ncclGetLastError() returns in this thread, cut to a fixed size.
void set_last_error(const std::string& text) noexcept;
const char* last_error() noexcept;

}  // namespace llm_comm::nccl
