// Table of instructions. Each is a function of its operands' types; wrappers read and write registers around it.
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>

#include "wave.h"

namespace gcn {

namespace {

// ---- Operands ------------------------------------------------------------------------------------------------------

struct Half {
  uint16_t bits;
};

template <class T>
constexpr uint8_t kRegisters = sizeof(T) == 8 ? 2 : 1;

template <class T>
Formal source() {
  if (std::is_same_v<T, Half>) return {'v', 1};
  return {std::is_same_v<T, float> ? 'f' : 'x', kRegisters<T>};
}

template <class T>
T from_bits(uint64_t bits) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits));
  } else if constexpr (std::is_same_v<T, Half>) {
    return {static_cast<uint16_t>(bits)};
  } else {
    return static_cast<T>(bits);
  }
}

template <class T>
uint64_t to_bits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<uint32_t>(value);
  } else if constexpr (std::is_same_v<T, Half>) {
    return value.bits;
  } else {
    return static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <class T>
T read(const Wave& w, const Operand& o, uint32_t lane) {
  uint64_t bits = o.constant;
  if (o.kind == Operand::Kind::kVector) {
    bits = w.v[o.reg][lane];
    if constexpr (sizeof(T) == 8) bits |= uint64_t{w.v[o.reg + 1][lane]} << 32;
  } else if (o.kind == Operand::Kind::kScalar) {
    bits = sizeof(T) == 8 ? w.pair(o.reg) : w.s[o.reg];
  }
  if constexpr (sizeof(T) < 8) bits = static_cast<uint32_t>(bits) >> o.shift & o.mask;
  if constexpr (std::is_same_v<T, float>) {
    if (o.is_absolute) bits &= 0x7FFFFFFF;
    if (o.is_negated) bits ^= 0x80000000;
  }
  return from_bits<T>(bits);
}

template <class T>
void write_vector(Wave& w, const Instruction& in, uint32_t lane, T value) {
  const uint64_t bits = to_bits(value);
  uint32_t& low = w.v[in.operand[0].reg][lane];
  if constexpr (sizeof(T) == 8) {
    low = static_cast<uint32_t>(bits);
    w.v[in.operand[0].reg + 1][lane] = static_cast<uint32_t>(bits >> 32);
  } else {
    const uint32_t kept = in.keeps_rest ? low & ~(in.to_mask << in.to_shift) : 0;
    low = kept | (static_cast<uint32_t>(bits) & in.to_mask) << in.to_shift;
  }
}

template <class T>
void write_scalar(Wave& w, const Operand& to, T value) {
  if constexpr (sizeof(T) == 8) {
    w.set_pair(to.reg, to_bits(value));
  } else {
    w.s[to.reg] = static_cast<uint32_t>(to_bits(value));
  }
}

// ---- Wrappers ------------------------------------------------------------------------------------------------------

template <class F>
struct SignatureOf;
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...) const> {
  using Type = R(A...);
};
template <auto F>
using Signature = typename SignatureOf<decltype(&decltype(F)::operator())>::Type;

// result = F(arguments) in each active lane.
template <auto F, class S>
struct Vector;
template <auto F, class R, class... A>
struct Vector<F, R(A...)> {
  static void run(Wave& w, const Instruction& in) {
    for_each_lane(w.exec(), [&](uint32_t lane) {
      [&]<size_t... i>(std::index_sequence<i...>) {
        write_vector<R>(w, in, lane, F(read<A>(w, in.operand[1 + i], lane)...));
      }(std::index_sequence_for<A...>());
    });
  }
  static Opcode opcode() { return {run, {{'v', kRegisters<R>}, source<A>()...}}; }
};
template <auto F>
Opcode vector() {
  return Vector<F, Signature<F>>::opcode();
}

// A mask of lanes = F(arguments); 0 in inactive lanes.
template <auto F, class S>
struct Compare;
template <auto F, class... A>
struct Compare<F, bool(A...)> {
  static void run(Wave& w, const Instruction& in) {
    uint64_t mask = 0;
    for_each_lane(w.exec(), [&](uint32_t lane) {
      [&]<size_t... i>(std::index_sequence<i...>) {
        mask |= uint64_t{F(read<A>(w, in.operand[1 + i], lane)...)} << lane;
      }(std::index_sequence_for<A...>());
    });
    w.set_pair(in.operand[0].reg, mask);
  }
  static Opcode opcode() { return {run, {{'s', 2}, source<A>()...}}; }
};

template <auto F>
Opcode compare() {
  return Compare<F, Signature<F>>::opcode();
}

// result, carry mask = F(carry, arguments). `HasIn`: the last operand is a mask of incoming carries.
template <auto F, bool HasIn, class S>
struct Carry;
template <auto F, bool HasIn, class R, class... A>
struct Carry<F, HasIn, R(bool&, A...)> {
  static void run(Wave& w, const Instruction& in) {
    const uint64_t incoming = HasIn ? w.pair(in.operand[2 + sizeof...(A)].reg) : 0;
    uint64_t outgoing = 0;
    for_each_lane(w.exec(), [&](uint32_t lane) {
      bool carry = incoming >> lane & 1;
      [&]<size_t... i>(std::index_sequence<i...>) {
        write_vector<R>(w, in, lane, F(carry, read<A>(w, in.operand[2 + i], lane)...));
      }(std::index_sequence_for<A...>());
      outgoing |= uint64_t{carry} << lane;
    });
    w.set_pair(in.operand[1].reg, outgoing);
  }
  static Opcode opcode() {
    std::vector<Formal> formals = {{'v', kRegisters<R>}, {'s', 2}, source<A>()...};
    if (HasIn) formals.push_back({'s', 2});
    return {run, formals};
  }
};
template <auto F, bool HasIn>
Opcode carry() {
  return Carry<F, HasIn, Signature<F>>::opcode();
}

// Scalar: result = F(arguments), or F(scc, arguments), which may have no result.
template <auto F, class S>
struct Scalar;
template <auto F, class R, class... A>
struct Scalar<F, R(A...)> {
  static void run(Wave& w, const Instruction& in) {
    [&]<size_t... i>(std::index_sequence<i...>) {
      write_scalar<R>(w, in.operand[0], F(read<A>(w, in.operand[1 + i], 0)...));
    }(std::index_sequence_for<A...>());
  }
  static Opcode opcode() { return {run, {{'s', kRegisters<R>}, source<A>()...}}; }
};
template <auto F, class R, class... A>
struct Scalar<F, R(bool&, A...)> {
  static void run(Wave& w, const Instruction& in) {
    bool scc = w.scc;
    [&]<size_t... i>(std::index_sequence<i...>) {
      if constexpr (std::is_void_v<R>) {
        F(scc, read<A>(w, in.operand[i], 0)...);
      } else {
        write_scalar<R>(w, in.operand[0], F(scc, read<A>(w, in.operand[1 + i], 0)...));
      }
    }(std::index_sequence_for<A...>());
    w.scc = scc;
  }
  static Opcode opcode() {
    if constexpr (std::is_void_v<R>) {
      return {run, {source<A>()...}};
    } else {
      return {run, {{'s', kRegisters<R>}, source<A>()...}};
    }
  }
};
template <auto F>
Opcode scalar() {
  return Scalar<F, Signature<F>>::opcode();
}

// result = EXEC, EXEC = F(source, EXEC).
template <auto F>
Opcode save_exec() {
  const auto run = [](Wave& w, const Instruction& in) {
    const auto from = read<uint64_t>(w, in.operand[1], 0);
    const uint64_t exec = w.exec();
    w.set_pair(in.operand[0].reg, exec);
    w.set_pair(kExec, F(from, exec));
    w.scc = w.exec() != 0;
  };
  return {run, {{'s', 2}, {'x', 2}}};
}

template <auto Condition>
Opcode branch() {
  const auto run = [](Wave& w, const Instruction& in) {
    if (Condition(w)) w.next = in.target;
  };
  return {run, {{'l', 0}}};
}

// ---- Arithmetic ----------------------------------------------------------------------------------------------------

// NaN of an operand is passed on, made quiet; an invalid operation gives the positive quiet NaN.
float with_nan(float result, std::initializer_list<float> operands) {
  if (!std::isnan(result)) return result;
  for (const float operand : operands) {
    if (std::isnan(operand)) return std::bit_cast<float>(std::bit_cast<uint32_t>(operand) | 0x400000u);
  }
  return std::bit_cast<float>(0x7FC00000u);
}

float sum(float a, float b) { return with_nan(a + b, {a, b}); }
float product(float a, float b) { return with_nan(a * b, {a, b}); }

// All values of fp16 are values of fp32.
float widened(Half half) {
  const uint32_t sign = (half.bits & 0x8000u) << 16;
  const uint32_t exponent = half.bits >> 10 & 31;
  const uint32_t fraction = half.bits & 0x3FFu;
  uint32_t magnitude = 0;
  if (exponent == 31) {
    magnitude = 0x7F800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0);
  } else {
    const uint32_t whole = exponent == 0 ? fraction : fraction | 0x400u;
    const int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - 25;
    magnitude = std::bit_cast<uint32_t>(std::ldexp(static_cast<float>(whole), scale));
  }
  return std::bit_cast<float>(sign | magnitude);
}

// Rounds to nearest, ties to even, and keeps subnormal values.
Half narrowed(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7E00u | (bits >> 13 & 0x3FFu))};
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520) return {static_cast<uint16_t>(sign | 0x7C00u)};
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // 1024 and more: a normal value
  return {static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + static_cast<uint32_t>(units)))};
}

uint32_t truncated(float value) {
  if (!(value > 0)) return 0;
  return value >= 0x1p32f ? ~0u : static_cast<uint32_t>(value);
}

// The ISA promises an error of at most one unit in the last place. One of the two neighbours of the exact result is
// drawn, so integer divisions, which begin with this, must not depend on the rounding.
float reciprocal(float value) {
  const float nearest = 1.0f / value;
  if (!std::isnormal(nearest)) return nearest;
  const float error = std::fma(-value, nearest, 1.0f);  // above 0: the exact result has a larger magnitude
  const uint32_t step = error > 0 ? 1 : error < 0 ? ~0u : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) + emulator::draw_below(2) * step);
}

// GCC cannot parse > and >> in a lambda that is a template argument.
template <class T>
T shifted_right(T bits, uint32_t count) {
  return bits >> count % (8 * sizeof(T));
}
template <class T>
uint32_t upper_half(T bits) {
  return static_cast<uint32_t>(bits >> 32);
}

uint32_t reversed(uint32_t bits) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 32; ++i) result |= (bits >> i & 1) << (31 - i);
  return result;
}

// Bytes of (high, low), chosen by the bytes of `selectors`.
uint32_t permuted(uint32_t high, uint32_t low, uint32_t selectors) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> 8 * i & 0xFF;
    uint32_t byte = selector >= 13 ? 0xFF : 0;
    if (selector < 8) byte = static_cast<uint32_t>(bytes >> 8 * selector & 0xFF);
    if (selector >= 8 && selector < 12) byte = bytes >> (16 * (selector - 8) + 15) & 1 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}

uint32_t field(uint32_t bits, uint32_t offset, uint32_t width) {
  return bits >> (offset & 31) & ((1u << (width & 31)) - 1);
}

int32_t signed_field(uint32_t bits, uint32_t offset, uint32_t width) {
  width &= 31;
  if (width == 0) return 0;
  return static_cast<int32_t>(field(bits, offset, width) << (32 - width)) >> (32 - width);
}

int64_t signed_24(uint32_t bits) { return static_cast<int32_t>(bits << 8) >> 8; }

int32_t low_half(uint32_t bits) { return static_cast<int16_t>(bits); }

uint32_t with_overflow(bool& overflow, int64_t exact) {
  overflow = exact != static_cast<int32_t>(exact);
  return static_cast<uint32_t>(exact);
}

uint32_t difference(bool& borrow, uint32_t a, uint32_t b) {
  const uint64_t exact = uint64_t{a} - b - borrow;
  borrow = exact >> 32 != 0;
  return static_cast<uint32_t>(exact);
}

uint32_t total(bool& carry, uint32_t a, uint32_t b) {
  const uint64_t exact = uint64_t{a} + b + carry;
  carry = exact >> 32 != 0;
  return static_cast<uint32_t>(exact);
}

// ---- Instructions that do not fit the wrappers ---------------------------------------------------------------------

// Lanes below `lane` in the lower (`First` is 0) or upper half of a mask, added to the second operand.
template <uint32_t First>
void count_lanes_below(Wave& w, const Instruction& in) {
  for_each_lane(w.exec(), [&](uint32_t lane) {
    const uint64_t below = (uint64_t{1} << lane) - 1;
    const auto mask = read<uint32_t>(w, in.operand[1], lane) & static_cast<uint32_t>(below >> First);
    write_vector<uint32_t>(w, in, lane,
                           read<uint32_t>(w, in.operand[2], lane) + static_cast<uint32_t>(std::popcount(mask)));
  });
}

void select_by_mask(Wave& w, const Instruction& in) {
  const uint64_t mask = w.pair(in.operand[3].reg);
  for_each_lane(w.exec(), [&](uint32_t lane) {
    write_vector<uint32_t>(w, in, lane, read<uint32_t>(w, in.operand[mask >> lane & 1 ? 2 : 1], lane));
  });
}

template <auto F>
void packed(Wave& w, const Instruction& in) {
  for_each_lane(w.exec(), [&](uint32_t lane) {
    const uint64_t sources[] = {read<uint64_t>(w, in.operand[1], lane), read<uint64_t>(w, in.operand[2], lane)};
    uint64_t result = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      const auto& selected = half == 0 ? in.low_half : in.high_half;
      float value[2];
      for (uint32_t i = 0; i < 2; ++i) value[i] = from_bits<float>(sources[i] >> 32 * selected[i]);
      result |= to_bits(F(value[0], value[1])) << 32 * half;
    }
    write_vector(w, in, lane, result);
  });
}

void read_lane(Wave& w, const Instruction& in) {
  w.s[in.operand[0].reg] = w.v[in.operand[1].reg][read<uint32_t>(w, in.operand[2], 0) % kLanes];
}

void write_lane(Wave& w, const Instruction& in) {
  w.v[in.operand[0].reg][read<uint32_t>(w, in.operand[2], 0) % kLanes] = read<uint32_t>(w, in.operand[1], 0);
}

void read_first_lane(Wave& w, const Instruction& in) {
  const uint32_t lane = w.exec() == 0 ? 0 : static_cast<uint32_t>(std::countr_zero(w.exec()));
  w.s[in.operand[0].reg] = w.v[in.operand[1].reg][lane];
}

void issue(Wave& w, const Instruction& in) { w.issue(in); }

// ---- Table ---------------------------------------------------------------------------------------------------------

using Table = std::map<std::string, Opcode, std::less<>>;

template <class T>
void add_compares(Table& table, const std::string& type) {
  table["v_cmp_lt_" + type] = compare<[](T a, T b) { return a < b; }>();
  table["v_cmp_le_" + type] = compare<[](T a, T b) { return a <= b; }>();
  table["v_cmp_gt_" + type] = compare<[](T a, T b) { return b < a; }>();
  table["v_cmp_ge_" + type] = compare<[](T a, T b) { return b <= a; }>();
  table["v_cmp_eq_" + type] = compare<[](T a, T b) { return a == b; }>();
  table["v_cmp_ne_" + type] = compare<[](T a, T b) { return a != b; }>();
}

template <class T>
void add_scalar_compares(Table& table, const std::string& type) {
  table["s_cmp_lt_" + type] = scalar<[](bool& scc, T a, T b) { scc = a < b; }>();
  table["s_cmp_le_" + type] = scalar<[](bool& scc, T a, T b) { scc = a <= b; }>();
  table["s_cmp_gt_" + type] = scalar<[](bool& scc, T a, T b) { scc = b < a; }>();
  table["s_cmp_ge_" + type] = scalar<[](bool& scc, T a, T b) { scc = a >= b; }>();
  table["s_cmp_eq_" + type] = scalar<[](bool& scc, T a, T b) { scc = a == b; }>();
  table["s_cmp_lg_" + type] = scalar<[](bool& scc, T a, T b) { scc = a != b; }>();
}

template <class T>
void add_scalar_logic(Table& table, const std::string& type) {
  table["s_mov_" + type] = scalar<[](T a) { return a; }>();
  table["s_cselect_" + type] = scalar<[](bool& scc, T a, T b) { return scc ? a : b; }>();
  table["s_not_" + type] = scalar<[](bool& scc, T a) { return scc = ~a != 0, ~a; }>();
  table["s_and_" + type] = scalar<[](bool& scc, T a, T b) { return scc = (a & b) != 0, a & b; }>();
  table["s_or_" + type] = scalar<[](bool& scc, T a, T b) { return scc = (a | b) != 0, a | b; }>();
  table["s_xor_" + type] = scalar<[](bool& scc, T a, T b) { return scc = (a ^ b) != 0, a ^ b; }>();
  table["s_andn2_" + type] = scalar<[](bool& scc, T a, T b) { return scc = (a & ~b) != 0, a & ~b; }>();
  table["s_orn2_" + type] = scalar<[](bool& scc, T a, T b) { return scc = (a | ~b) != 0, a | ~b; }>();
  table["s_nor_" + type] = scalar<[](bool& scc, T a, T b) { return scc = ~(a | b) != 0, ~(a | b); }>();
  constexpr uint32_t kMask = 8 * sizeof(T) - 1;
  table["s_lshl_" + type] = scalar<[](bool& scc, T a, uint32_t b) {
    const T result = a << (b & kMask);
    scc = result != 0;
    return result;
  }>();
  table["s_lshr_" + type] = scalar<[](bool& scc, T a, uint32_t b) {
    const T result = shifted_right(a, b);
    scc = result != 0;
    return result;
  }>();
  table["s_bcnt1_i32_" + type] = scalar<[](bool& scc, T a) {
    scc = a != 0;
    return static_cast<uint32_t>(std::popcount(a));
  }>();
}

void add_scalar(Table& table) {
  add_scalar_compares<uint32_t>(table, "u32");
  add_scalar_compares<int32_t>(table, "i32");
  table["s_cmp_eq_u64"] = scalar<[](bool& scc, uint64_t a, uint64_t b) { scc = a == b; }>();
  table["s_cmp_lg_u64"] = scalar<[](bool& scc, uint64_t a, uint64_t b) { scc = a != b; }>();
  table["s_cmpk_eq_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { scc = a == (b & 0xFFFF); }>();
  table["s_cmpk_lg_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { scc = a != (b & 0xFFFF); }>();
  table["s_cmpk_lt_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { scc = a < (b & 0xFFFF); }>();
  table["s_cmpk_gt_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { scc = (b & 0xFFFF) < a; }>();
  table["s_cmpk_eq_i32"] = scalar<[](bool& scc, int32_t a, uint32_t b) { scc = a == low_half(b); }>();
  table["s_cmpk_lg_i32"] = scalar<[](bool& scc, int32_t a, uint32_t b) { scc = a != low_half(b); }>();
  table["s_cmpk_lt_i32"] = scalar<[](bool& scc, int32_t a, uint32_t b) { scc = a < low_half(b); }>();
  table["s_cmpk_gt_i32"] = scalar<[](bool& scc, int32_t a, uint32_t b) { scc = low_half(b) < a; }>();
  table["s_bitcmp0_b32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { scc = field(a, b, 1) == 0; }>();
  table["s_bitcmp1_b32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { scc = field(a, b, 1) == 1; }>();
  table["s_brev_b32"] = scalar<[](uint32_t a) { return reversed(a); }>();
  add_scalar_logic<uint32_t>(table, "b32");
  add_scalar_logic<uint64_t>(table, "b64");
  table["s_movk_i32"] = scalar<[](uint32_t a) { return low_half(a); }>();
  table["s_ashr_i32"] = scalar<[](bool& scc, int32_t a, uint32_t b) {
    const int32_t result = shifted_right(a, b);
    scc = result != 0;
    return result;
  }>();
  table["s_bfe_i32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) {
    const int32_t result = signed_field(a, b, shifted_right(b, 16));
    scc = result != 0;
    return result;
  }>();
  table["s_bfe_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) {
    const uint32_t result = field(a, b, shifted_right(b, 16));
    scc = result != 0;
    return result;
  }>();
  table["s_add_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = false, total(scc, a, b); }>();
  table["s_addc_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { return total(scc, a, b); }>();
  table["s_sub_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = false, difference(scc, a, b); }>();
  table["s_subb_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { return difference(scc, a, b); }>();
  table["s_add_i32"] = scalar<[](bool& scc, int32_t a, int32_t b) { return with_overflow(scc, int64_t{a} + b); }>();
  table["s_sub_i32"] = scalar<[](bool& scc, int32_t a, int32_t b) { return with_overflow(scc, int64_t{a} - b); }>();
  table["s_mul_i32"] = scalar<[](uint32_t a, uint32_t b) { return a * b; }>();
  table["s_mul_hi_u32"] = scalar<[](uint32_t a, uint32_t b) { return upper_half(uint64_t{a} * b); }>();
  table["s_mul_hi_i32"] = scalar<[](int32_t a, int32_t b) { return upper_half(int64_t{a} * b); }>();
  table["s_min_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = a < b, scc ? a : b; }>();
  table["s_max_u32"] = scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = b < a, scc ? a : b; }>();
  table["s_lshl1_add_u32"] =
      scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = ~0u < (uint64_t{a} << 1) + b, (a << 1) + b; }>();
  table["s_lshl2_add_u32"] =
      scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = ~0u < (uint64_t{a} << 2) + b, (a << 2) + b; }>();
  table["s_lshl3_add_u32"] =
      scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = ~0u < (uint64_t{a} << 3) + b, (a << 3) + b; }>();
  table["s_lshl4_add_u32"] =
      scalar<[](bool& scc, uint32_t a, uint32_t b) { return scc = ~0u < (uint64_t{a} << 4) + b, (a << 4) + b; }>();
  table["s_mulk_i32"] = {[](Wave& w, const Instruction& in) {
                           w.s[in.operand[0].reg] *=
                               static_cast<uint32_t>(low_half(read<uint32_t>(w, in.operand[1], 0)));
                         },
                         {{'s', 1}, {'c', 1}}};
  table["s_and_saveexec_b64"] = save_exec<[](uint64_t a, uint64_t exec) { return a & exec; }>();
  table["s_or_saveexec_b64"] = save_exec<[](uint64_t a, uint64_t exec) { return a | exec; }>();
  table["s_andn2_saveexec_b64"] = save_exec<[](uint64_t a, uint64_t exec) { return a & ~exec; }>();
}

void add_program(Table& table) {
  table["s_branch"] = branch<[](const Wave&) { return true; }>();
  table["s_cbranch_scc0"] = branch<[](const Wave& w) { return !w.scc; }>();
  table["s_cbranch_scc1"] = branch<[](const Wave& w) { return w.scc; }>();
  table["s_cbranch_vccz"] = branch<[](const Wave& w) { return w.pair(kVcc) == 0; }>();
  table["s_cbranch_vccnz"] = branch<[](const Wave& w) { return w.pair(kVcc) != 0; }>();
  table["s_cbranch_execz"] = branch<[](const Wave& w) { return w.exec() == 0; }>();
  table["s_cbranch_execnz"] = branch<[](const Wave& w) { return w.exec() != 0; }>();
  table["s_endpgm"] = {[](Wave& w, const Instruction&) { w.has_ended = true; }, {}};
  table["s_nop"] = {[](Wave&, const Instruction&) {}, {{'c', 1}}};
  table["s_trap"] = {[](Wave& w, const Instruction&) { w.fail("a trap"); }, {{'c', 1}}};
  table["s_sleep"] = {[](Wave& w, const Instruction&) {
                        w.complete_some();
                        emulator::yield();
                      },
                      {{'c', 1}}};
  table["s_barrier"] = {[](Wave& w, const Instruction&) {
                          w.complete_some();
                          emulator::block_barrier();
                        },
                        {}};
  table["s_waitcnt"] = {[](Wave& w, const Instruction& in) { w.wait(in.vector_count, in.local_count); }, {}};
}

void add_vector(Table& table) {
  add_compares<uint32_t>(table, "u32");
  add_compares<int32_t>(table, "i32");
  add_compares<uint64_t>(table, "u64");
  add_compares<int64_t>(table, "i64");
  table["v_cmp_o_f32"] = compare<[](float a, float b) { return !std::isnan(a) && !std::isnan(b); }>();
  table["v_mov_b32"] = vector<[](uint32_t a) { return a; }>();
  table["v_mov_b64"] = vector<[](uint64_t a) { return a; }>();
  table["v_not_b32"] = vector<[](uint32_t a) { return ~a; }>();
  table["v_bfrev_b32"] = vector<[](uint32_t a) { return reversed(a); }>();
  table["v_and_b32"] = vector<[](uint32_t a, uint32_t b) { return a & b; }>();
  table["v_or_b32"] = vector<[](uint32_t a, uint32_t b) { return a | b; }>();
  table["v_xor_b32"] = vector<[](uint32_t a, uint32_t b) { return a ^ b; }>();
  table["v_add_u32"] = vector<[](uint32_t a, uint32_t b) { return a + b; }>();
  table["v_sub_u32"] = vector<[](uint32_t a, uint32_t b) { return a - b; }>();
  table["v_subrev_u32"] = vector<[](uint32_t a, uint32_t b) { return b - a; }>();
  table["v_min_u32"] = vector<[](uint32_t a, uint32_t b) { return a < b ? a : b; }>();
  table["v_max_u32"] = vector<[](uint32_t a, uint32_t b) { return b < a ? a : b; }>();
  table["v_lshlrev_b32"] = vector<[](uint32_t a, uint32_t b) { return b << (a & 31); }>();
  table["v_lshrrev_b32"] = vector<[](uint32_t a, uint32_t b) { return shifted_right(b, a); }>();
  table["v_ashrrev_i32"] = vector<[](uint32_t a, int32_t b) { return shifted_right(b, a); }>();
  table["v_lshlrev_b64"] = vector<[](uint32_t a, uint64_t b) { return b << (a & 63); }>();
  table["v_lshrrev_b64"] = vector<[](uint32_t a, uint64_t b) { return shifted_right(b, a); }>();
  table["v_mul_lo_u32"] = vector<[](uint32_t a, uint32_t b) { return a * b; }>();
  table["v_mul_hi_u32"] = vector<[](uint32_t a, uint32_t b) { return upper_half(uint64_t{a} * b); }>();
  table["v_mad_i32_i24"] = vector<[](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>(signed_24(a) * signed_24(b)) + c;
  }>();
  table["v_add3_u32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return a + b + c; }>();
  table["v_or3_b32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return a | b | c; }>();
  table["v_and_or_b32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }>();
  table["v_lshl_or_b32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return a << (b & 31) | c; }>();
  table["v_lshl_add_u32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return (a << (b & 31)) + c; }>();
  table["v_lshl_add_u64"] = vector<[](uint64_t a, uint32_t b, uint64_t c) { return (a << (b & 7)) + c; }>();
  table["v_add_lshl_u32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return (a + b) << (c & 31); }>();
  table["v_bfi_b32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (~a & c); }>();
  table["v_max3_u32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return std::max(std::max(a, b), c); }>();
  table["v_bfe_u32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return field(a, b, c); }>();
  table["v_bfe_i32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return signed_field(a, b, c); }>();
  table["v_alignbit_b32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) {
    return static_cast<uint32_t>(shifted_right(uint64_t{a} << 32 | b, c & 31));
  }>();
  table["v_perm_b32"] = vector<[](uint32_t a, uint32_t b, uint32_t c) { return permuted(a, b, c); }>();
  table["v_add_f32"] = vector<[](float a, float b) { return sum(a, b); }>();
  table["v_sub_f32"] = vector<[](float a, float b) { return sum(a, -b); }>();
  table["v_mul_f32"] = vector<[](float a, float b) { return product(a, b); }>();
  table["v_fma_f32"] = vector<[](float a, float b, float c) { return with_nan(std::fma(a, b, c), {a, b, c}); }>();
  table["v_rcp_iflag_f32"] = vector<[](float a) { return reciprocal(a); }>();
  table["v_cvt_f32_u32"] = vector<[](uint32_t a) { return static_cast<float>(a); }>();
  table["v_cvt_u32_f32"] = vector<[](float a) { return truncated(a); }>();
  table["v_cvt_f32_f16"] = vector<[](Half a) { return widened(a); }>();
  table["v_cvt_f16_f32"] = vector<[](float a) { return narrowed(a); }>();
  table["v_pk_add_f32"] = {packed<sum>, {{'v', 2}, {'x', 2}, {'x', 2}}};
  table["v_pk_mul_f32"] = {packed<product>, {{'v', 2}, {'x', 2}, {'x', 2}}};

  table["v_add_co_u32"] = carry<[](bool& c, uint32_t a, uint32_t b) { return total(c, a, b); }, false>();
  table["v_addc_co_u32"] = carry<[](bool& c, uint32_t a, uint32_t b) { return total(c, a, b); }, true>();
  table["v_sub_co_u32"] = carry<[](bool& c, uint32_t a, uint32_t b) { return difference(c, a, b); }, false>();
  table["v_subb_co_u32"] = carry<[](bool& c, uint32_t a, uint32_t b) { return difference(c, a, b); }, true>();
  table["v_subrev_co_u32"] = carry<[](bool& c, uint32_t a, uint32_t b) { return difference(c, b, a); }, false>();
  table["v_subbrev_co_u32"] = carry<[](bool& c, uint32_t a, uint32_t b) { return difference(c, b, a); }, true>();
  table["v_mad_u64_u32"] = carry<[](bool& c, uint32_t a, uint32_t b, uint64_t addend) {
    const uint64_t result = uint64_t{a} * b + addend;
    c = result < addend;
    return result;
  },
                                 false>();

  table["v_cndmask_b32"] = {select_by_mask, {{'v', 1}, {'x', 1}, {'x', 1}, {'s', 2}}};
  table["v_mbcnt_lo_u32_b32"] = {count_lanes_below<0>, {{'v', 1}, {'x', 1}, {'x', 1}}};
  table["v_mbcnt_hi_u32_b32"] = {count_lanes_below<32>, {{'v', 1}, {'x', 1}, {'x', 1}}};
  table["v_readlane_b32"] = {read_lane, {{'s', 1}, {'v', 1}, {'x', 1}}};
  table["v_writelane_b32"] = {write_lane, {{'v', 1}, {'x', 1}, {'x', 1}}};
  table["v_readfirstlane_b32"] = {read_first_lane, {{'s', 1}, {'v', 1}}};
}

// ---- Memory --------------------------------------------------------------------------------------------------------

template <class T>
T first(const void* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

// The new value of a read-modify-write. The operands of a compare-and-swap are the new value and the expected one.
template <class T>
uint64_t added(uint64_t found, const void* data) {
  return static_cast<T>(found + first<T>(data));
}
uint64_t or_ed(uint64_t found, const void* data) { return found | first<uint32_t>(data); }
uint64_t swapped_if_equal(uint64_t found, const void* data) {
  const auto* const words = static_cast<const uint32_t*>(data);
  return static_cast<uint32_t>(found) == words[1] ? words[0] : found;
}
uint64_t counted_up(uint64_t found, const void* data) {
  return static_cast<uint32_t>(found) >= first<uint32_t>(data) ? 0 : found + 1;
}

void add_memory(Table& table) {
  using Space = AccessKind::Space;
  using What = AccessKind::What;
  const auto load = [&](const std::string& name, uint8_t bytes, bool is_signed = false) {
    const auto registers = static_cast<uint8_t>((bytes + 3) / 4);
    const bool is_global = name.substr(0, 6) == "global";
    std::vector<Formal> formals = {{'v', registers}, {'v', static_cast<uint8_t>(is_global ? 0 : 1)}};
    if (is_global) formals.push_back({'o', 2});
    table[name] = {issue, formals, {is_global ? Space::kGlobal : Space::kLocal, What::kLoad, bytes, is_signed}};
  };
  const auto store = [&](const std::string& name, uint8_t bytes, bool takes_high = false) {
    const auto registers = static_cast<uint8_t>((bytes + 3) / 4);
    const bool is_global = name.substr(0, 6) == "global";
    std::vector<Formal> formals = {{'v', static_cast<uint8_t>(is_global ? 0 : 1)}, {'v', registers}};
    if (is_global) formals.push_back({'o', 2});
    table[name] = {issue,
                   formals,
                   {is_global ? Space::kGlobal : Space::kLocal, What::kStore, bytes, false, takes_high, registers}};
  };
  for (const std::string width : {"dword", "dwordx2", "dwordx3", "dwordx4"}) {
    const auto bytes = static_cast<uint8_t>(width == "dword" ? 4 : 4 * (width.back() - '0'));
    load("global_load_" + width, bytes);
    store("global_store_" + width, bytes);
  }
  load("global_load_ubyte", 1);
  load("global_load_sbyte", 1, true);
  load("global_load_ushort", 2);
  load("global_load_sshort", 2, true);
  store("global_store_byte", 1);
  store("global_store_byte_d16_hi", 1, true);
  store("global_store_short", 2);
  store("global_store_short_d16_hi", 2, true);
  for (const auto& [width, bytes] : {std::pair{"b32", 4}, {"b64", 8}, {"b96", 12}, {"b128", 16}}) {
    load("ds_read_" + std::string(width), static_cast<uint8_t>(bytes));
    store("ds_write_" + std::string(width), static_cast<uint8_t>(bytes));
  }
  load("ds_read_u8", 1);
  load("ds_read_i8", 1, true);
  load("ds_read_u16", 2);
  load("ds_read_i16", 2, true);
  store("ds_write_b8", 1);
  store("ds_write_b16", 2);

  const auto modify = [&](const std::string& name, uint8_t bytes, uint8_t data, decltype(AccessKind::update) update) {
    const auto result = static_cast<uint8_t>(bytes / 4);
    table["global_atomic_" + name] = {issue,
                                      {{'v', result}, {'v', 0}, {'v', data}, {'o', 2}},
                                      {Space::kGlobal, What::kModify, bytes, false, false, data, update}};
  };
  modify("add", 4, 1, added<uint32_t>);
  modify("add_x2", 8, 2, added<uint64_t>);
  modify("or", 4, 1, or_ed);
  modify("inc", 4, 1, counted_up);
  modify("cmpswap", 4, 2, swapped_if_equal);
  table["ds_add_u32"] = {
      issue, {{'v', 1}, {'v', 1}}, {Space::kLocal, What::kModify, 4, false, false, 1, added<uint32_t>}};
  table["ds_add_u64"] = {
      issue, {{'v', 1}, {'v', 2}}, {Space::kLocal, What::kModify, 8, false, false, 2, added<uint64_t>}};
  table["ds_or_b32"] = {issue, {{'v', 1}, {'v', 1}}, {Space::kLocal, What::kModify, 4, false, false, 1, or_ed}};
  table["ds_add_rtn_u64"] = {
      issue, {{'v', 2}, {'v', 1}, {'v', 2}}, {Space::kLocal, What::kModify, 8, false, false, 2, added<uint64_t>}};
  table["ds_bpermute_b32"] = {
      issue, {{'v', 1}, {'v', 1}, {'v', 1}}, {Space::kLocal, What::kExchangeLanes, 4, false, false, 1}};

  for (const uint8_t registers : {1, 2, 4, 8, 16}) {
    const std::string width = registers == 1 ? "" : "x" + std::to_string(registers);
    table["s_load_dword" + width] = {issue,
                                     {{'s', registers}, {'s', 2}, {'x', 1}},
                                     {Space::kScalar, What::kLoad, static_cast<uint8_t>(4 * registers)}};
  }
  table["s_memrealtime"] = {issue, {{'s', 2}}, {Space::kScalar, What::kReadClock, 8}};
  table["buffer_wbl2"] = {issue, {}, {Space::kGlobal, What::kWriteBack}};
  table["buffer_inv"] = {[](Wave& w, const Instruction&) { w.acquire(); }, {}, {Space::kGlobal, What::kInvalidate}};
}

const Table& opcodes() {
  static const Table all = [] {
    Table table;
    add_scalar(table);
    add_program(table);
    add_vector(table);
    add_memory(table);
    return table;
  }();
  return all;
}

}  // namespace

const Opcode* find_opcode(std::string_view name) {
  const auto found = opcodes().find(name);
  return found == opcodes().end() ? nullptr : &found->second;
}

std::vector<std::string_view> all_opcodes() {
  std::vector<std::string_view> names;
  for (const auto& [name, opcode] : opcodes()) names.push_back(name);
  return names;
}

}  // namespace gcn
