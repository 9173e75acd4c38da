// What LLM_COMM_NCCL_DEBUG asks for, on stderr; and the last error of a thread.
#pragma once

#include <string>

namespace llm_comm::nccl {

// Whether LLM_COMM_NCCL_DEBUG is INFO.
bool is_informing();
void inform(const std::string& line);
// Unless LLM_COMM_NCCL_DEBUG is NONE.
void warn(const std::string& line);

// What ncclGetLastError() is to say in this thread. The text is cut to what it keeps.
void set_last_error(const std::string& text) noexcept;
const char* last_error() noexcept;

}  // namespace llm_comm::nccl
