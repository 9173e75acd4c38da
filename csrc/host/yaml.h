// Reader for the YAML of tuning tables, shared by Communicator and the NCCL library so that both accept the same files.
//
// Supported: block and flow mappings and lists, one-line plain or quoted scalars, comments. Rejected, with a line
// number: anchors and aliases, tags, multi-line scalars, directives, a second document, duplicate keys, more than 16
// levels. It exists because `pip install .` cannot rely on a C++ YAML library.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llm_comm::host {

// Error in a file; the message does not contain the file's name.
struct FileError : std::invalid_argument {
  explicit FileError(const std::string& text, int in_line = 0)
      : std::invalid_argument(in_line == 0 ? text : "line " + std::to_string(in_line) + ": " + text),
        bare(text),
        line(in_line) {}
  std::string bare;  // message without the line number
  int line;          // 0: concerns the whole file
};

// A value of a YAML file.
struct Node {
  enum class Kind { kWord, kMapping, kList };
  Kind kind = Kind::kWord;
  int line = 1;                                       // of the key, or of the first character
  std::string word;                                   // kWord: text without quotes
  bool is_quoted = false;                             // kWord: then it is no number, boolean or null
  std::vector<std::pair<std::string, Node>> entries;  // kMapping: in the order of the file
  std::vector<Node> items;                            // kList

  bool is_null() const;
  // Value of an unquoted scalar: decimal digits, for number() with an optional fraction. Empty if it is no such number.
  std::optional<uint64_t> whole_number() const;
  std::optional<double> number() const;
  // Value of a key; nullptr if absent.
  const Node* find(std::string_view key) const;
};

// read_file(): content of a regular file of at most 128 KiB. read_yaml(): its parsed value. Both throw FileError. Text
// must be UTF-8 without control characters other than tabs.
std::string read_file(const std::string& path);
Node read_yaml(std::string_view text);

// A value for an error message, shortened if long.
std::string shown(const Node& node);
std::string shortened(std::string text, size_t most);

}  // namespace llm_comm::host
