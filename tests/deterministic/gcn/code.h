// Machine code of AMD GPUs (gfx942), read from the assembly text that clang writes with -S.
//
// Sources: "AMD Instinct MI300 Instruction Set Architecture" (AMD) says what each instruction does. "User Guide for
// AMDGPU Backend" (LLVM) describes the text, directives, metadata, the first registers of a wave, and the memory model.
//
// Anything that this folder does not know is an error that names the line: an instruction, a modifier, an operand, a
// directive with another value than these kernels have.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gcn {

class Wave;
struct Instruction;
using Handler = void (*)(Wave&, const Instruction&);

inline constexpr uint32_t kLanes = 64;
// Numbers of scalar registers with a name of their own.
inline constexpr uint32_t kVcc = 106;
inline constexpr uint32_t kM0 = 124;
inline constexpr uint32_t kExec = 126;

struct Operand {
  enum class Kind : uint8_t { kScalar, kVector, kConstant, kFloat, kOff, kLabel };
  Kind kind = Kind::kConstant;
  bool is_negated = false;
  bool is_absolute = false;
  uint16_t reg = 0;
  uint16_t registers = 0;
  // Part of the register that an SDWA instruction reads: its value is register >> shift & mask.
  uint32_t shift = 0;
  uint32_t mask = ~0u;
  uint64_t constant = 0;

  bool is_register() const { return kind == Kind::kScalar || kind == Kind::kVector; }
};

// One operand as an instruction wants it.
struct Formal {
  // v: vector register; s: scalar register; x: register or constant; f: that as fp32, possibly negated; o: scalar
  // register or "off"; c: constant; l: label
  char kind;
  uint8_t registers;
};

// Effect of an access on memory.
struct AccessKind {
  enum class Space : uint8_t { kNone, kGlobal, kLocal, kScalar };
  enum class What : uint8_t { kLoad, kStore, kModify, kExchangeLanes, kReadClock, kWriteBack, kInvalidate };
  Space space = Space::kNone;
  What what = What::kLoad;
  uint8_t bytes = 0;
  bool is_signed = false;      // a load of less than 4 bytes extends the sign
  bool takes_high = false;     // a store of less than 4 bytes takes the upper half of the register
  uint8_t data_registers = 0;  // registers that a store or a read-modify-write reads
  uint64_t (*update)(uint64_t found, const void* data) = nullptr;
};

// Entry of the table of instructions.
struct Opcode {
  Handler handler;
  std::vector<Formal> formals;
  AccessKind access = {};
};

// Returns nullptr for an unknown name. `name`: without the suffixes _e32, _e64 and _sdwa.
const Opcode* find_opcode(std::string_view name);
std::vector<std::string_view> all_opcodes();

struct Instruction {
  const Opcode* opcode = nullptr;
  uint32_t line = 0;
  uint32_t target = 0;  // of a branch: number of an instruction
  uint8_t operands = 0;
  std::array<Operand, 6> operand;
  // Part of the register that an SDWA instruction writes; other bits become 0, or stay if keeps_rest.
  uint32_t to_shift = 0;
  uint32_t to_mask = ~0u;
  bool keeps_rest = false;
  std::array<uint8_t, 2> low_half = {0, 0};   // op_sel of a packed operation: 1 takes the upper element
  std::array<uint8_t, 2> high_half = {1, 1};  // op_sel_hi
  int64_t offset = 0;
  bool sc0 = false;
  bool sc1 = false;
  uint32_t vector_count = ~0u;  // s_waitcnt vmcnt(n); ~0: no such wait
  uint32_t local_count = ~0u;   // s_waitcnt lgkmcnt(n)

  // A read-modify-write has a result register only if its text has one: the address and the data follow.
  bool has_result() const;
};

// Argument in the kernel-argument segment, from the metadata.
struct Argument {
  uint32_t offset;
  uint32_t bytes;
  std::string kind;
};

struct Kernel {
  std::string file;
  std::string name;
  uint32_t argument_bytes = 0;
  uint32_t vector_registers = 0;
  std::vector<Argument> arguments;
  std::vector<Instruction> instructions;

  // File and line of an instruction.
  std::string place(const Instruction& instruction) const { return file + ":" + std::to_string(instruction.line); }
};

// Kernels of several files. A kernel is decoded when it is asked for first. Errors are std::runtime_error.
class MachineCode {
 public:
  void add(const std::string& path);
  // Takes the mangled name of an emulated kernel. Returns nullptr if no file has that kernel for AMD's GPUs.
  const Kernel* find(std::string emulated) const;

  // Grids of algorithms, and those of them that have run as machine code.
  mutable uint64_t grids = 0;
  mutable uint64_t launches = 0;

 private:
  struct File {
    std::string path;
    std::string text;
    std::vector<std::string_view> lines;
    std::map<std::string, std::vector<Argument>, std::less<>> arguments;  // by kernel
  };
  struct Place {
    const File* file;
    size_t line;
    std::unique_ptr<Kernel> kernel;
  };
  static void read_metadata(File& file);

  std::vector<std::unique_ptr<File>> files_;
  mutable std::map<std::string, Place, std::less<>> places_;
};

// Decodes the line of one instruction. Labels are left to the caller, who gets their names.
Instruction decode(std::string_view text, uint32_t line, std::vector<std::string>& labels);

}  // namespace gcn
