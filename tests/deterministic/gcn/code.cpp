#include "code.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace gcn {

namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

std::string_view without_comment(std::string_view line) { return trimmed(line.substr(0, line.find(';'))); }

// Parts between blanks and commas, but not those within brackets.
std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (depth == 0 && (c == ',' || std::isspace(static_cast<unsigned char>(c)))) {
      if (!parts.back().empty()) parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  if (parts.back().empty()) parts.pop_back();
  return parts;
}

// The whole text as a number; false if it is none.
bool parse_integer(std::string_view text, int64_t& value) {
  const std::string whole(text);
  char* end = nullptr;
  value = std::strtoll(whole.c_str(), &end, 0);
  return !whole.empty() && *end == '\0';
}

[[noreturn]] void refuse(const std::string& what, std::string_view text) {
  throw std::runtime_error(what + ": " + std::string(text));
}

bool parse_named_register(std::string_view text, Operand& operand) {
  static const std::map<std::string_view, std::pair<uint16_t, uint16_t>> kNamed = {
      {"vcc", {kVcc, 2}},   {"vcc_lo", {kVcc, 1}},   {"vcc_hi", {kVcc + 1, 1}},  {"m0", {kM0, 1}},
      {"exec", {kExec, 2}}, {"exec_lo", {kExec, 1}}, {"exec_hi", {kExec + 1, 1}}};
  const auto named = kNamed.find(text);
  if (named == kNamed.end()) return false;
  operand.kind = Operand::Kind::kScalar;
  std::tie(operand.reg, operand.registers) = named->second;
  return true;
}

bool parse_numbered_register(std::string_view text, Operand& operand) {
  if (text.size() < 2 || (text[0] != 'v' && text[0] != 's')) return false;
  operand.kind = text[0] == 'v' ? Operand::Kind::kVector : Operand::Kind::kScalar;
  text.remove_prefix(1);
  int64_t first = 0;
  int64_t last = 0;
  if (text.front() == '[') {
    const size_t colon = text.find(':');
    if (colon == text.npos || text.back() != ']') return false;
    if (!parse_integer(text.substr(1, colon - 1), first)) return false;
    if (!parse_integer(text.substr(colon + 1, text.size() - colon - 2), last)) return false;
  } else {
    if (!parse_integer(text, first)) return false;
    last = first;
  }
  const int64_t most = operand.kind == Operand::Kind::kVector ? 255 : kVcc - 1;
  if (first < 0 || last < first || last > most) return false;
  operand.reg = static_cast<uint16_t>(first);
  operand.registers = static_cast<uint16_t>(last - first + 1);
  return true;
}

Operand parse_operand(std::string_view whole) {
  std::string_view text = whole;
  Operand operand;
  if (text == "off") {
    operand.kind = Operand::Kind::kOff;
    return operand;
  }
  if (text.substr(0, 2) == ".L") {
    operand.kind = Operand::Kind::kLabel;
    return operand;
  }
  int64_t integer = 0;
  if (parse_integer(text, integer)) {
    operand.constant = static_cast<uint64_t>(integer);
    return operand;
  }
  if (text.find('.') != text.npos) {
    const std::string copy(text);
    char* end = nullptr;
    const float value = std::strtof(copy.c_str(), &end);
    if (*end != '\0') refuse("unknown operand", whole);
    operand.kind = Operand::Kind::kFloat;
    operand.constant = std::bit_cast<uint32_t>(value);
    return operand;
  }
  if (text.front() == '-') {
    operand.is_negated = true;
    text.remove_prefix(1);
  }
  if (text.size() > 2 && text.front() == '|' && text.back() == '|') {
    operand.is_absolute = true;
    text = text.substr(1, text.size() - 2);
  }
  if (!parse_named_register(text, operand) && !parse_numbered_register(text, operand)) {
    refuse("unknown operand", whole);
  }
  return operand;
}

// Part of a register that SDWA selects.
void parse_selection(std::string_view value, uint32_t& shift, uint32_t& mask) {
  static const std::map<std::string_view, std::pair<uint32_t, uint32_t>> kSelections = {
      {"DWORD", {0, ~0u}},   {"WORD_0", {0, 0xFFFF}}, {"WORD_1", {16, 0xFFFF}}, {"BYTE_0", {0, 0xFF}},
      {"BYTE_1", {8, 0xFF}}, {"BYTE_2", {16, 0xFF}},  {"BYTE_3", {24, 0xFF}}};
  const auto found = kSelections.find(value);
  if (found == kSelections.end()) refuse("unknown selection", value);
  std::tie(shift, mask) = found->second;
}

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    if (text == name) return true;
  }
  return false;
}

// Applies a modifier that is not an operand. Returns false if `text` is an operand.
bool apply_modifier(const std::string& text, Instruction& in, bool is_sdwa) {
  const AccessKind::Space space = in.opcode->access.space;
  const size_t colon = text.find(':');
  const bool has_value = colon != text.npos && text.find('[') > colon;
  if (!has_value && !is_one_of(text, {"sc0", "sc1"})) return false;
  const std::string name = text.substr(0, colon);
  const std::string value = has_value ? text.substr(colon + 1) : "";
  if (name == "sc0" && space == AccessKind::Space::kGlobal) {
    in.sc0 = true;
  } else if (name == "sc1" && space == AccessKind::Space::kGlobal) {
    in.sc1 = true;
  } else if (name == "offset" && space != AccessKind::Space::kNone && parse_integer(value, in.offset)) {
  } else if (is_sdwa && name == "dst_sel") {
    parse_selection(value, in.to_shift, in.to_mask);
  } else if (is_sdwa && name == "src0_sel") {
    parse_selection(value, in.operand[1].shift, in.operand[1].mask);
  } else if (is_sdwa && name == "src1_sel") {
    parse_selection(value, in.operand[2].shift, in.operand[2].mask);
  } else if (is_sdwa && name == "dst_unused" && is_one_of(value, {"UNUSED_PAD", "UNUSED_PRESERVE"})) {
    in.keeps_rest = value == "UNUSED_PRESERVE";
  } else if (is_one_of(name, {"op_sel", "op_sel_hi"}) && value.size() == 5 && value[0] == '[') {
    auto& halves = name == "op_sel" ? in.low_half : in.high_half;
    halves = {static_cast<uint8_t>(value[1] == '1'), static_cast<uint8_t>(value[3] == '1')};
  } else {
    refuse("unknown modifier", text);
  }
  return true;
}

void check_operand(const Operand& operand, const Formal& formal) {
  using Kind = Operand::Kind;
  bool fits = false;
  switch (formal.kind) {
    case 'v':
      fits = operand.kind == Kind::kVector;
      break;
    case 's':
      fits = operand.kind == Kind::kScalar;
      break;
    case 'o':
      fits = operand.kind == Kind::kScalar || operand.kind == Kind::kOff;
      break;
    case 'c':
      fits = operand.kind == Kind::kConstant;
      break;
    case 'l':
      fits = operand.kind == Kind::kLabel;
      break;
    default:  // x, f
      fits = operand.is_register() || operand.kind == Kind::kConstant ||
             (operand.kind == Kind::kFloat && formal.registers == 1);
  }
  fits &= formal.kind == 'f' || !(operand.is_negated || operand.is_absolute);
  if (!fits || (operand.is_register() && formal.registers != 0 && operand.registers != formal.registers)) {
    refuse("an operand of another kind or width is wanted, kind " + std::string(1, formal.kind), "");
  }
}

// Counts of s_waitcnt. Counters that are not named are not waited for.
void parse_waits(const std::vector<std::string>& parts, Instruction& in) {
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t open = parts[i].find('(');
    int64_t count = 0;
    const bool is_call = open != std::string::npos && parts[i].back() == ')' &&
                         parse_integer(std::string_view(parts[i]).substr(open + 1, parts[i].size() - open - 2), count);
    const std::string name = parts[i].substr(0, open);
    if (!is_call || !is_one_of(name, {"vmcnt", "lgkmcnt"})) refuse("unknown wait", parts[i]);
    (name == "vmcnt" ? in.vector_count : in.local_count) = static_cast<uint32_t>(count);
  }
}

void check_scope(const Instruction& in) {
  using What = AccessKind::What;
  const AccessKind& access = in.opcode->access;
  if (access.space != AccessKind::Space::kGlobal || access.what == What::kModify) return;
  const bool wants_scope = access.what == What::kWriteBack || access.what == What::kInvalidate;
  if (in.sc0 != in.sc1 || (wants_scope && !in.sc0))
    refuse("only accesses of no scope and of system scope are known", "");
}

}  // namespace

bool Instruction::has_result() const {
  switch (opcode->access.what) {
    case AccessKind::What::kModify:
      return operands == (opcode->access.space == AccessKind::Space::kGlobal ? 4 : 3);
    case AccessKind::What::kLoad:
    case AccessKind::What::kExchangeLanes:
    case AccessKind::What::kReadClock:
      return true;
    default:
      return false;
  }
}

Instruction decode(std::string_view text, uint32_t line, std::vector<std::string>& labels) {
  const std::vector<std::string> parts = split(text);
  std::string_view name = parts[0];
  bool is_sdwa = false;
  for (const std::string_view suffix : {"_e32", "_e64", "_sdwa"}) {
    if (name.size() <= suffix.size() || name.substr(name.size() - suffix.size()) != suffix) continue;
    name.remove_suffix(suffix.size());
    is_sdwa = suffix == "_sdwa";
    break;
  }
  Instruction in;
  in.line = line;
  in.opcode = find_opcode(name);
  if (in.opcode == nullptr) refuse("unknown instruction", parts[0]);
  if (name == "s_waitcnt") {
    parse_waits(parts, in);
    return in;
  }
  for (size_t i = 1; i < parts.size(); ++i) {
    if (apply_modifier(parts[i], in, is_sdwa)) continue;
    if (in.operands == in.operand.size()) refuse("too many operands", text);
    const Operand parsed = parse_operand(parts[i]);
    if (parsed.kind == Operand::Kind::kLabel) labels.push_back(parts[i]);
    in.operand[in.operands++] = parsed;
  }
  // A read-modify-write has a result register only with sc0.
  const bool has_no_result = in.opcode->access.space == AccessKind::Space::kGlobal &&
                             in.opcode->access.what == AccessKind::What::kModify && !in.sc0;
  const size_t skipped = has_no_result ? 1 : 0;
  if (in.operands + skipped != in.opcode->formals.size()) refuse("another number of operands is wanted", text);
  for (size_t i = 0; i < in.operands; ++i) {
    const Operand& operand = in.operand[i];
    Formal formal = in.opcode->formals[i + skipped];
    // A global address is a pair of vector registers, or a vector register beside a pair of scalar ones.
    const bool is_address = in.opcode->access.space == AccessKind::Space::kGlobal && formal.registers == 0;
    if (is_address) formal.registers = in.operand[in.operands - 1].kind == Operand::Kind::kOff ? 2 : 1;
    check_operand(operand, formal);
  }
  check_scope(in);
  return in;
}

void MachineCode::read_metadata(File& file) {
  std::vector<Argument> found;
  bool inside = false;
  for (const std::string_view line : file.lines) {
    if (line.substr(0, 15) == "amdhsa.kernels:") inside = true;
    if (!inside) continue;
    std::string_view text = trimmed(line);
    if (text.substr(0, 2) == "- ") text = trimmed(text.substr(2));
    const size_t colon = text.find(':');
    if (colon == text.npos) continue;
    const std::string_view key = text.substr(0, colon);
    const std::string value(trimmed(text.substr(colon + 1)));
    if (key == ".offset") found.push_back({static_cast<uint32_t>(std::stoul(value)), 0, ""});
    if (key == ".size") found.back().bytes = static_cast<uint32_t>(std::stoul(value));
    if (key == ".value_kind") found.back().kind = value;
    if (key == ".name") file.arguments[value] = std::exchange(found, {});
  }
}

void MachineCode::add(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("cannot read " + path);
  std::stringstream content;
  content << stream.rdbuf();
  auto file = std::make_unique<File>();
  file->path = path;
  file->text = content.str();
  for (size_t begin = 0; begin < file->text.size();) {
    const size_t end = std::min(file->text.find('\n', begin), file->text.size());
    file->lines.push_back(std::string_view(file->text).substr(begin, end - begin));
    begin = end + 1;
  }
  read_metadata(*file);
  bool is_of_target = false;
  for (size_t i = 0; i < file->lines.size(); ++i) {
    const std::string_view line = without_comment(file->lines[i]);
    is_of_target |= line == ".amdgcn_target \"amdgcn-amd-amdhsa--gfx942\"";
    if (line.empty() || line.back() != ':' || file->arguments.count(line.substr(0, line.size() - 1)) == 0) continue;
    places_[std::string(line.substr(0, line.size() - 1))] = {file.get(), i, nullptr};
  }
  if (!is_of_target) throw std::runtime_error(path + " is not assembly text for gfx942");
  files_.push_back(std::move(file));
}

namespace {

// Directives of a kernel whose value changes what its instructions do. All others are checked against this or are
// without effect here.
void check_directive(std::string_view name, int64_t value, Kernel& kernel) {
  static const std::map<std::string_view, int64_t> kWanted = {{"group_segment_fixed_size", 0},
                                                              {"private_segment_fixed_size", 0},
                                                              {"user_sgpr_count", 2},
                                                              {"user_sgpr_dispatch_ptr", 0},
                                                              {"user_sgpr_queue_ptr", 0},
                                                              {"user_sgpr_kernarg_segment_ptr", 1},
                                                              {"user_sgpr_dispatch_id", 0},
                                                              {"user_sgpr_kernarg_preload_length", 0},
                                                              {"user_sgpr_private_segment_size", 0},
                                                              {"enable_private_segment", 0},
                                                              {"system_sgpr_workgroup_id_x", 1},
                                                              {"system_sgpr_workgroup_id_y", 0},
                                                              {"system_sgpr_workgroup_id_z", 0},
                                                              {"system_sgpr_workgroup_info", 0},
                                                              {"system_vgpr_workitem_id", 0},
                                                              {"float_round_mode_32", 0},
                                                              {"float_round_mode_16_64", 0},
                                                              {"float_denorm_mode_32", 3},
                                                              {"float_denorm_mode_16_64", 3},
                                                              {"fp16_overflow", 0},
                                                              {"tg_split", 0}};
  const auto wanted = kWanted.find(name);
  if (wanted != kWanted.end() && wanted->second != value) {
    refuse("only .amdhsa_" + std::string(name) + " " + std::to_string(wanted->second) + " is known, not",
           std::to_string(value));
  }
  if (name == "kernarg_size") kernel.argument_bytes = static_cast<uint32_t>(value);
  if (name == "next_free_vgpr") kernel.vector_registers = static_cast<uint32_t>(value);
}

void decode_kernel(Kernel& kernel, const std::vector<std::string_view>& lines, size_t first) {
  std::map<std::string, uint32_t, std::less<>> labels;
  std::vector<std::pair<size_t, std::string>> branches;
  constexpr std::string_view kDirective = ".amdhsa_";
  for (size_t i = first + 1;; ++i) {
    const auto number = static_cast<uint32_t>(i + 1);
    const std::string_view line = i < lines.size() ? without_comment(lines[i]) : std::string_view{};
    try {
      if (i == lines.size()) refuse("the kernel has no end", kernel.name);
      if (line.substr(0, 10) == ".Lfunc_end") break;
      if (line.empty()) continue;
      if (line.back() == ':') {
        labels[std::string(line.substr(0, line.size() - 1))] = static_cast<uint32_t>(kernel.instructions.size());
      } else if (line.substr(0, kDirective.size()) == kDirective) {
        const std::vector<std::string> parts = split(line.substr(kDirective.size()));
        int64_t value = 0;
        if (parts.size() == 2 && parse_integer(parts[1], value)) check_directive(parts[0], value, kernel);
      } else if (line.front() == '.') {
        if (!is_one_of(split(line)[0], {".section", ".p2align", ".end_amdhsa_kernel"}))
          refuse("unknown directive", line);
      } else {
        std::vector<std::string> names;
        kernel.instructions.push_back(decode(line, number, names));
        for (const std::string& name : names) branches.emplace_back(kernel.instructions.size() - 1, name);
      }
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(kernel.file + ":" + std::to_string(number) + ": " + error.what());
    }
  }
  for (const auto& [at, label] : branches) {
    const auto found = labels.find(label);
    if (found == labels.end()) throw std::runtime_error(kernel.file + ": no label " + label);
    kernel.instructions[at].target = found->second;
  }
}

}  // namespace

const Kernel* MachineCode::find(std::string emulated) const {
  constexpr std::string_view kFrom = "13deterministic";  // inline namespaces (platform_types.h), as mangled
  constexpr std::string_view kTo = "3hip";
  for (size_t at; (at = emulated.find(kFrom)) != std::string::npos;) emulated.replace(at, kFrom.size(), kTo);
  // Ranks that compare calls launch kernels for it (check_call.cuh), which belong to no algorithm.
  if (emulated.find("CheckCallArgs") == std::string::npos) ++grids;
  const auto found = places_.find(emulated);
  if (found == places_.end()) return nullptr;
  Place& place = found->second;
  ++launches;
  if (place.kernel == nullptr) {
    auto kernel = std::make_unique<Kernel>();
    kernel->file = place.file->path;
    kernel->name = found->first;
    kernel->arguments = place.file->arguments.at(found->first);
    decode_kernel(*kernel, place.file->lines, place.line);
    place.kernel = std::move(kernel);
  }
  return place.kernel.get();
}

}  // namespace gcn
