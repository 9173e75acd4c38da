// Single instructions against values from the ISA document or by hand. Exit status: 0 all right, 1 not.
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "wave.h"

namespace {

using gcn::Wave;

// Registers by their names in assembly text, and "scc". A vector register has the value in all lanes.
using Values = std::vector<std::pair<std::string, uint64_t>>;

struct Check {
  const char* text;
  Values before;
  Values after;
};

constexpr uint32_t kLane = 37;            // whose vector registers are compared
constexpr uint64_t kExec = 0x2000000005;  // lanes 0, 2 and 37

const Check kChecks[] = {
    // fp16: subnormal values, ties to even, overflow, NaN, infinity.
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x3F800000}}, {{"v0", 0x3C00}}},
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x33800000}}, {{"v0", 0x0001}}},  // 2^-24
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x33000000}}, {{"v0", 0x0000}}},  // 2^-25, a tie
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x33000001}}, {{"v0", 0x0001}}},
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0xB8FFFFFF}}, {{"v0", 0x8800}}},
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x477FEFFF}}, {{"v0", 0x7BFF}}},
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x477FF000}}, {{"v0", 0x7C00}}},  // 65520, a tie
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x3F801000}}, {{"v0", 0x3C00}}},  // a tie
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x3F803000}}, {{"v0", 0x3C02}}},  // a tie
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0xFF800000}}, {{"v0", 0xFC00}}},
    {"v_cvt_f16_f32_e32 v0, v1", {{"v1", 0x7F802000}}, {{"v0", 0x7E01}}},
    {"v_cvt_f32_f16_e32 v0, v1", {{"v1", 0xABCD0001}}, {{"v0", 0x33800000}}},
    {"v_cvt_f32_f16_e32 v0, v1", {{"v1", 0x83FF}}, {{"v0", 0xB87FC000}}},
    {"v_cvt_f32_f16_e32 v0, v1", {{"v1", 0x7BFF}}, {{"v0", 0x477FE000}}},
    {"v_cvt_f32_f16_e32 v0, v1", {{"v1", 0x7C01}}, {{"v0", 0x7FC02000}}},
    {"v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
     {{"v1", 0xC0001234}},
     {{"v0", 0xC0000000}}},
    {"v_cvt_f16_f32_sdwa v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD",
     {{"v0", ~0u}, {"v1", 0x40000000}},
     {{"v0", 0x40000000}}},
    {"v_or_b32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:WORD_0",
     {{"v0", 0x11223344}, {"v1", 0xA0000000}, {"v2", 0xFFFF0305}},
     {{"v0", 0x1122A544}}},
    // fp32: subnormal values stay, NaN is passed on, invalid operations.
    {"v_add_f32_e32 v0, v1, v2", {{"v1", 1}, {"v2", 1}}, {{"v0", 2}}},
    {"v_add_f32_e32 v0, v1, v2", {{"v1", 0x7F812345}, {"v2", 1}}, {{"v0", 0x7FC12345}}},
    {"v_add_f32_e32 v0, v1, v2", {{"v1", 0x7F800000}, {"v2", 0xFF800000}}, {{"v0", 0x7FC00000}}},
    {"v_add_f32_e64 v0, -v1, |v2|", {{"v1", 0x3F800000}, {"v2", 0xC0400000}}, {{"v0", 0x40000000}}},
    {"v_add_f32_e32 v0, 1.0, v1", {{"v1", 0x33800000}}, {{"v0", 0x3F800000}}},  // a tie
    {"v_fma_f32 v0, v1, v1, v2", {{"v1", 0x3F800001}, {"v2", 0xBF800002}}, {{"v0", 0x28800000}}},
    {"v_pk_add_f32 v[0:1], v[2:3], v[4:5]",
     {{"v[2:3]", 0x3F80000040000000}, {"v[4:5]", 0x3F80000040000000}},
     {{"v[0:1]", 0x4000000040800000}}},
    {"v_pk_add_f32 v[0:1], v[2:3], v[4:5] op_sel:[0,1] op_sel_hi:[1,0]",
     {{"v[2:3]", 0x3F80000040000000}, {"v[4:5]", 0x0000000040800000}},
     {{"v[0:1]", 0x40A0000040000000}}},
    {"v_cvt_u32_f32_e32 v0, v1", {{"v1", 0x4F800000}}, {{"v0", ~0u}}},
    {"v_cvt_u32_f32_e32 v0, v1", {{"v1", 0xBF800000}}, {{"v0", 0}}},
    {"v_cmp_o_f32_e32 vcc, v1, v2", {{"v1", 0x7F800001}, {"v2", 0}, {"vcc", 5}}, {{"vcc", 0}}},
    // Integers.
    {"v_lshl_add_u64 v[0:1], v[2:3], 3, v[4:5]",
     {{"v[2:3]", 0x2000000020000001}, {"v[4:5]", 0xFFFFFFFFFFFFFFFF}},
     {{"v[0:1]", 0x0000000100000007}}},
    {"v_mad_u64_u32 v[0:1], s[4:5], v2, v3, v[4:5]",
     {{"v2", ~0u}, {"v3", ~0u}, {"v[4:5]", 0xFFFFFFFFFFFFFFFF}},
     {{"v[0:1]", 0xFFFFFFFE00000000}, {"s[4:5]", kExec}}},
    {"v_mad_i32_i24 v0, v1, -12, v2", {{"v1", 0x01000002}, {"v2", 25}}, {{"v0", 1}}},
    {"v_mul_hi_u32 v0, v1, v2", {{"v1", ~0u}, {"v2", ~0u}}, {{"v0", ~0u - 1}}},
    {"v_bfe_u32 v0, v1, 8, 4", {{"v1", 0x12345678}}, {{"v0", 6}}},
    {"v_bfe_i32 v0, v1, 16, 1", {{"v1", 0x00010000}}, {{"v0", ~0u}}},
    {"v_alignbit_b32 v0, v1, v2, 16", {{"v1", 0x11112222}, {"v2", 0x33334444}}, {{"v0", 0x22223333}}},
    {"v_perm_b32 v0, v1, v2, s4", {{"v1", 0x77665544}, {"v2", 0x33221100}, {"s4", 0x0C0D0504}}, {{"v0", 0x00FF5544}}},
    {"v_perm_b32 v0, v1, v2, s4", {{"v1", 0x80000000}, {"v2", 0x00008000}, {"s4", 0x080B090A}}, {{"v0", 0xFFFF0000}}},
    {"v_bfrev_b32_e32 v0, -2", {}, {{"v0", 0x7FFFFFFF}}},
    {"v_mbcnt_hi_u32_b32 v0, -1, v1", {{"v1", 32}}, {{"v0", 37}}},
    {"v_mbcnt_lo_u32_b32 v0, s4, 1", {{"s4", 0x80000001}}, {{"v0", 3}}},
    // Carries and masks: inactive lanes give 0.
    {"v_add_co_u32_e32 v0, vcc, v1, v2", {{"v1", ~0u}, {"v2", 1}, {"vcc", ~0ull}}, {{"v0", 0}, {"vcc", kExec}}},
    {"v_addc_co_u32_e32 v0, vcc, 0, v1, vcc", {{"v1", ~0u}, {"vcc", 5}}, {{"v0", ~0u}, {"vcc", 5}}},
    {"v_subb_co_u32_e64 v0, s[4:5], v1, v2, s[6:7]",
     {{"v1", 3}, {"v2", 3}, {"s[6:7]", kExec}},
     {{"v0", ~0u}, {"s[4:5]", kExec}}},
    {"v_subbrev_co_u32_e32 v0, vcc, 0, v1, vcc", {{"v1", 0}, {"vcc", kExec}}, {{"v0", ~0u}, {"vcc", kExec}}},
    {"v_subrev_co_u32_e64 v0, s[4:5], 1, v1", {{"v1", 0}}, {{"v0", ~0u}, {"s[4:5]", kExec}}},
    {"v_cmp_lt_u64_e64 s[4:5], 1, v[2:3]", {{"v[2:3]", 1ull << 32}}, {{"s[4:5]", kExec}}},
    {"v_cmp_gt_i32_e32 vcc, 0, v1", {{"v1", 0x80000000}}, {{"vcc", kExec}}},
    {"v_cndmask_b32_e64 v0, 7, v1, s[4:5]", {{"v1", 9}, {"s[4:5]", 1ull << kLane}}, {{"v0", 9}}},
    {"v_cndmask_b32_e64 v0, 7, v1, s[4:5]", {{"v1", 9}, {"s[4:5]", ~(1ull << kLane)}}, {{"v0", 7}}},
    {"v_readfirstlane_b32 s4, v1", {{"v1", 9}}, {{"s4", 9}}},
    {"v_mov_b32_e32 v0, v1", {{"v0", 1}, {"v1", 2}, {"exec", 1}}, {{"v0", 1}}},
    {"v_writelane_b32 v0, s4, 37", {{"v0", 1}, {"s4", 2}, {"exec", 0}}, {{"v0", 2}}},
    {"v_readlane_b32 s4, v0, s5", {{"v0", 3}, {"s5", 70}}, {{"s4", 3}}},
    // Scalar instructions.
    {"s_and_saveexec_b64 s[4:5], vcc", {{"vcc", 6}}, {{"s[4:5]", kExec}, {"exec", 4}, {"scc", 1}}},
    {"s_andn2_saveexec_b64 s[4:5], s[4:5]", {{"s[4:5]", kExec}}, {{"s[4:5]", kExec}, {"exec", 0}, {"scc", 0}}},
    {"s_or_saveexec_b64 s[4:5], s[6:7]", {{"s[6:7]", 2}}, {{"s[4:5]", kExec}, {"exec", kExec | 2}}},
    {"s_add_u32 s4, s5, -1", {{"s5", 1}}, {{"s4", 0}, {"scc", 1}}},
    {"s_addc_u32 s4, s5, 0", {{"s5", ~0u}, {"scc", 1}}, {{"s4", 0}, {"scc", 1}}},
    {"s_subb_u32 s4, s5, 0", {{"s5", 0}, {"scc", 1}}, {{"s4", ~0u}, {"scc", 1}}},
    {"s_add_i32 s4, s5, 1", {{"s5", 0x7FFFFFFF}}, {{"s4", 0x80000000}, {"scc", 1}}},
    {"s_sub_i32 s4, s5, s6", {{"s5", 5}, {"s6", 7}}, {{"s4", ~0u - 1}, {"scc", 0}}},
    {"s_lshl4_add_u32 s4, s5, s6", {{"s5", 0x10000000}, {"s6", 3}}, {{"s4", 3}, {"scc", 1}}},
    {"s_bfe_i32 s4, s5, 0x10010", {{"s5", 0x00010000}}, {{"s4", ~0u}, {"scc", 1}}},
    {"s_bitcmp1_b32 s4, 4", {{"s4", 0x10}}, {{"scc", 1}}},
    {"s_bitcmp0_b32 s4, 36", {{"s4", 0x10}}, {{"scc", 0}}},
    {"s_cmpk_lt_i32 s4, 0xffff", {{"s4", 0xFFFFFFFE}}, {{"scc", 1}}},
    {"v_bfi_b32 v0, s4, v1, v2", {{"s4", 0x7FFFFFFF}, {"v1", 0xFF}, {"v2", 0x80000000}}, {{"v0", 0x800000FF}}},
    {"s_movk_i32 s4, 0x8000", {}, {{"s4", 0xFFFF8000}}},
    {"s_mulk_i32 s4, 0x50", {{"s4", 3}}, {{"s4", 240}}},
    {"s_mov_b64 s[4:5], 0x1ffff", {}, {{"s[4:5]", 0x1FFFF}}},
    {"s_mov_b64 s[4:5], -1", {}, {{"s[4:5]", ~0ull}}},
    {"s_nor_b64 s[4:5], s[6:7], vcc", {{"s[6:7]", ~0ull - 1}, {"vcc", 1}}, {{"s[4:5]", 0}, {"scc", 0}}},
    {"s_orn2_b64 s[4:5], s[6:7], exec", {{"s[6:7]", 1}}, {{"s[4:5]", ~kExec | 1}, {"scc", 1}}},
    {"s_cselect_b64 s[4:5], -1, 0", {{"scc", 1}}, {{"s[4:5]", ~0ull}}},
    {"s_bcnt1_i32_b64 s4, exec", {}, {{"s4", 3}, {"scc", 1}}},
    {"s_cmp_lg_u64 s[4:5], 0", {{"s[4:5]", 1ull << 40}}, {{"scc", 1}}},
    {"s_min_u32 s4, s5, -2", {{"s5", 7}}, {{"s4", 7}, {"scc", 1}}},
    {"s_mul_hi_u32 s4, s5, 10", {{"s5", ~0u}}, {{"s4", 9}}},
    {"s_ashr_i32 s4, s5, 31", {{"s5", 0x80000000}}, {{"s4", ~0u}}},
    {"s_lshr_b64 s[4:5], s[6:7], s8", {{"s[6:7]", 1ull << 63}, {"s8", 66}}, {{"s[4:5]", 1ull << 61}}},
};

// Texts that must be refused.
const char* const kRefused[] = {
    "v_frobnicate_b32 v0, v1",
    "v_mov_b32_e32 v0",
    "v_mov_b32_e32 v[0:1], v2",
    "v_mov_b32_e32 s0, v2",
    "v_mov_b32_e32 v0, -v2",
    "v_mov_b32_e32 v0, v256",
    "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,3]",
    "v_add_f32_e64 v0, v1, v2 clamp",
    "v_add_u32_e32 v0, v1, v2 dst_sel:WORD_0",
    "global_load_dword v0, v[2:3], off nt",
    "global_load_dword v0, v[2:3], off sc1",
    "global_load_dword v0, v2, off",
    "global_load_dword v0, v[2:3], s[4:5]",
    "global_atomic_add_x2 v0, v[2:3], v[4:5], s[6:7]",
    "buffer_wbl2 sc1",
    "s_waitcnt expcnt(0)",
    "s_mov_b64 s[4:5], s6",
};

gcn::Operand reg(const std::string& name) {
  std::vector<std::string> labels;
  const bool is_pair = name.find(':') != std::string::npos || name == "vcc" || name == "exec";
  const std::string text = name[0] == 'v' && name != "vcc"
                               ? (is_pair ? "v_mov_b64_e32 v[0:1], " : "v_mov_b32_e32 v0, ") + name
                               : (is_pair ? "s_mov_b64 s[0:1], " : "s_mov_b32 s0, ") + name;
  return gcn::decode(text, 0, labels).operand[1];
}

void set(Wave& wave, const std::string& name, uint64_t value) {
  if (name == "scc") {
    wave.scc = value != 0;
    return;
  }
  const gcn::Operand to = reg(name);
  for (uint32_t i = 0; i < to.registers; ++i) {
    const auto word = static_cast<uint32_t>(value >> 32 * i);
    if (to.kind == gcn::Operand::Kind::kScalar) {
      wave.s[to.reg + i] = word;
    } else {
      wave.v[to.reg + i].fill(word);
    }
  }
}

uint64_t get(const Wave& wave, const std::string& name) {
  if (name == "scc") return wave.scc ? 1 : 0;
  const gcn::Operand from = reg(name);
  uint64_t value = 0;
  for (uint32_t i = 0; i < from.registers; ++i) {
    const bool is_scalar = from.kind == gcn::Operand::Kind::kScalar;
    value |= uint64_t{is_scalar ? wave.s[from.reg + i] : wave.v[from.reg + i][kLane]} << 32 * i;
  }
  return value;
}

bool is_refused(const char* text) {
  std::vector<std::string> labels;
  try {
    gcn::decode(text, 0, labels);
    return false;
  } catch (const std::runtime_error&) {
    return true;
  }
}

}  // namespace

int main() {
  bool all = true;
  for (const Check& check : kChecks) {
    const auto wave = std::make_unique<Wave>();
    wave->scc = false;
    set(*wave, "exec", kExec);
    for (const auto& [name, value] : check.before) set(*wave, name, value);
    std::vector<std::string> labels;
    const gcn::Instruction in = gcn::decode(check.text, 0, labels);
    in.opcode->handler(*wave, in);
    for (const auto& [name, value] : check.after) {
      const uint64_t found = get(*wave, name);
      if (found == value) continue;
      std::printf("%s: %s is %llx, not %llx\n", check.text, name.c_str(), static_cast<unsigned long long>(found),
                  static_cast<unsigned long long>(value));
      all = false;
    }
  }
  for (const char* const text : kRefused) {
    if (is_refused(text)) continue;
    std::printf("%s: is not refused\n", text);
    all = false;
  }
  std::printf("%zu instructions known: %s\n", gcn::all_opcodes().size(), all ? "right" : "WRONG");
  return all ? 0 : 1;
}
