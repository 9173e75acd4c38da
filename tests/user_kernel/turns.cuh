// A kernel as a user writes it, with more blocks than run at once, in which each waits for the one before it.
#pragma once

#include "llm_comm/operation.cuh"

namespace user {

struct Turns {
  llm_comm::CommState* state;  // for tickets; zero at first
  uint32_t* turn;              // the number of the block that goes on; zero at first
  llm_comm::WaitBounds bounds;
};

// 16 bytes of dynamic shared memory.
LLM_COMM_KERNEL(512) take_turns(LLM_COMM_KERNEL_PARAM Turns turns) {
  const uint32_t block = llm_comm::take_ticket(turns.state, 1);
  if (llm_comm::thread_index() != 0) return;
  const auto is_its_turn = [&] { return llm_comm::load_acquire(turns.turn) == block; };
  if (!llm_comm::wait_until(is_its_turn, turns.bounds, {0, llm_comm::OperationKind::kUser, 0, 0}, 0, 0)) return;
  const bool is_last = block + 1 == llm_comm::block_count();
  llm_comm::store_release(turns.turn, is_last ? 0 : block + 1);
}

}  // namespace user
