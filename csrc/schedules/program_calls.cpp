#include "schedules/program_calls.h"

#include "algorithms/reference.h"
#include "schedules/program_world.h"
#include "schedules/values.h"

namespace llm_comm::inline LLM_COMM_TARGET::schedules {

namespace {

// Floats of very different magnitudes: their sum in another order has other bits.
uint32_t draw_float(Random& random) {
  const auto bits = static_cast<uint32_t>(random.next());
  return (bits & 0x807FFFFFu) | random.between(115, 139) << 23;
}

uint32_t draw_word(const Program& program, Random& random) {
  if (program.adds_up && !program.sums_in_rank_order) return draw_number(DataType::kFloat32, random);
  return program.adds_up && random.chance(128) ? draw_float(random) : draw_value(DataType::kFloat32, random);
}

uint64_t draw_shift(Random& random) { return random.chance(64) ? random.below(4) * sizeof(uint32_t) : 0; }

uint32_t result_of(const Program& program, const ProgramCall& call, uint32_t rank, uint64_t i) {
  const uint64_t of_part = call.size.part_bytes / sizeof(uint32_t);
  const uint64_t at = (program.has_parted_input ? rank * of_part : 0) + i % of_part;
  if (program.adds_up) {
    return sum_of_one(DataType::kFloat32, program.world, [&](uint32_t of) { return call.input[of][at]; });
  }
  return call.input[program.has_parted_output ? i / of_part : program.root][at];
}

}  // namespace

ProgramCall draw_call(const Program& program, Random& random) {
  ProgramCall call{};
  call.size = program.sizes[random.below(program.size_count)];
  call.is_in_place = program.works_in_place && random.chance(96);
  const uint64_t in = ProgramWorld::input_bytes(program, call.size.part_bytes) / sizeof(uint32_t);
  const uint64_t out = ProgramWorld::output_bytes(program, call.size.part_bytes) / sizeof(uint32_t);
  for (uint32_t rank = 0; rank < program.world; ++rank) {
    call.input_shift[rank] = rank > 0 && program.has_symmetric_input ? call.input_shift[0] : draw_shift(random);
    call.output_shift[rank] = rank > 0 && program.has_symmetric_output ? call.output_shift[0] : draw_shift(random);
    for (uint64_t i = 0; i < in; ++i) call.input[rank].push_back(draw_word(program, random));
  }
  for (uint32_t rank = 0; rank < program.world; ++rank) {
    for (uint64_t i = 0; i < out; ++i) call.expected[rank].push_back(result_of(program, call, rank, i));
  }
  return call;
}

}  // namespace llm_comm::inline LLM_COMM_TARGET::schedules
