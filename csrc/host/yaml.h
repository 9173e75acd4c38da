// The reader of the YAML of tuning tables, for Communicator and for the NCCL library: both take and refuse alike.
//
// It takes mappings and lists, in lines or in braces; words in one line, plain or in quotes; and comments. It refuses what such a file has
// no need of, with the number of the line: aliases and anchors, tags, texts of several lines, directives, a second document, equal keys,
// and more than 16 levels. No YAML library for C++ is there wherever `pip install .` compiles.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace llm_comm::host {

// What is wrong with a file, without its name.
struct FileError : std::invalid_argument {
  explicit FileError(const std::string& text, int in_line = 0)
      : std::invalid_argument(in_line == 0 ? text : "line " + std::to_string(in_line) + ": " + text),
        bare(text),
        line(in_line) {}
  std::string bare;  // without the line
  int line;          // 0: of the whole file
};

// A value of a file.
struct Node {
  enum class Kind { kWord, kMapping, kList };
  Kind kind = Kind::kWord;
  int line = 1;                                       // of its key, or where it begins
  std::string word;                                   // of kWord, without quotes
  bool is_quoted = false;                             // so it is no number, truth value or null
  std::vector<std::pair<std::string, Node>> entries;  // of kMapping, in their order
  std::vector<Node> items;                            // of kList

  bool is_null() const;
  // What a word means that is not in quotes: a number in decimal digits, perhaps with a fraction.
  std::optional<uint64_t> whole_number() const;
  std::optional<double> number() const;
  // The value of a key; nullptr if there is none.
  const Node* find(std::string_view key) const;
};

// The content of an ordinary file of at most 128 KiB, and what it means. Both throw FileError. Words are UTF-8 without control characters
// but for tabs.
std::string read_file(const std::string& path);
Node read_yaml(std::string_view text);

// A value as an error shows it, cut where it is long.
std::string shown(const Node& node);
std::string shortened(std::string text, size_t most);

}  // namespace llm_comm::host
