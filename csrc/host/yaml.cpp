#include "host/yaml.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace llm_comm::host {

namespace {

constexpr int kMaxLevels = 16;
constexpr size_t kMaxFileBytes = 128 << 10;  // the package's own files have a few KiB
constexpr size_t kMostOfAValue = 120;
constexpr size_t kMostOfAToken = 40;
constexpr std::string_view kFlow = ",[]{}";
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool is_in(char character, std::string_view some) { return some.find(character) != std::string_view::npos; }
// Includes '\0', which peek() returns at the end of the text.
bool is_blank(char character) { return is_in(character, std::string_view(" \t\r\n\0", 5)); }

bool is_character(uint32_t code) {
  const bool is_control = (code < 0x20 && code != '\t' && code != '\n') || (code >= 0x7f && code < 0xa0);
  // YAML treats U+2028 and U+2029 as line breaks.
  const bool is_surrogate = code >= 0xd800 && code <= 0xdfff;
  return !is_control && !is_surrogate && code != 0x2028 && code != 0x2029 && code <= 0x10ffff;
}

// First character of a text and its length in bytes; length 0 if it is invalid UTF-8.
std::pair<uint32_t, size_t> first_character(std::string_view text) {
  const auto byte = static_cast<unsigned char>(text[0]);
  if (byte < 0x80) return {byte, 1};
  const size_t length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
  uint32_t code = byte & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    const unsigned char next = i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
    if ((next & 0xc0) != 0x80) return {0, 0};
    code = code << 6 | (next & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  return {code, byte >= 0xc0 && byte < 0xf8 && code >= kLeast[length] ? length : 0};
}

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {
    check_characters();
    if (text_.substr(0, kByteOrderMark.size()) == kByteOrderMark) text_.remove_prefix(kByteOrderMark.size());
  }

  Node document() {
    skip();
    if (!at_end() && is_marker()) {
      pos_ += 3;
      skip();
    }
    Node found;
    if (!at_end()) found = block(0);
    skip();
    if (!at_end()) fail("it does not belong to the lines before it: look at its indentation");
    return found;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw FileError(what, line_); }

  void check_characters() {
    for (size_t length = 0; pos_ < text_.size(); pos_ += length) {
      const auto [code, bytes] = first_character(text_.substr(pos_));
      if (bytes == 0) fail("its bytes are not those of UTF-8");
      const bool ends_line = code == '\r' && text_.substr(pos_, 2) == "\r\n";
      if (!is_character(code) && !ends_line) fail("character " + std::to_string(code) + " is not allowed");
      if (code == '\n') ++line_;
      length = bytes;
    }
    pos_ = 0;
    line_ = 1;
  }

  bool at_end() const { return pos_ >= text_.size(); }
  char peek(size_t ahead = 0) const { return pos_ + ahead < text_.size() ? text_[pos_ + ahead] : '\0'; }
  bool at_line_end() const { return at_end() || peek() == '\n'; }
  int column() const { return static_cast<int>(pos_ - line_start_); }
  // True at an entry of a block list.
  bool is_dash() const { return peek() == '-' && is_blank(peek(1)); }
  // True at a document marker.
  bool is_marker() const {
    const std::string_view marker = text_.substr(pos_, 3);
    return column() == 0 && (marker == "---" || marker == "...") && is_blank(peek(3));
  }
  std::string token() const {
    const std::string_view rest = text_.substr(pos_);
    return shortened(std::string(rest.substr(0, rest.find_first_of(" \t\r\n,[]{}"))), kMostOfAToken);
  }

  void skip_spaces() {
    while (is_in(peek(), " \t\r")) ++pos_;
  }

  // Skips white space, line ends and comments.
  void skip() {
    const bool is_first = pos_ == 0;
    for (;; ++pos_) {
      const bool follows_blank = pos_ == 0 || is_blank(text_[pos_ - 1]);
      if (peek() == '#' && follows_blank) pos_ = std::min(text_.find('\n', pos_), text_.size());
      if (at_end() || !is_blank(peek())) break;
      if (peek() == '\n') {
        ++line_;
        line_start_ = pos_ + 1;
      } else if (peek() == '\t' && text_.find_first_not_of(' ', line_start_) == pos_) {
        fail("it is indented by a tab: take spaces");
      }
    }
    if (!is_first && !at_end() && is_marker()) fail("a second document begins; there may be one, without ...");
  }

  // True if the scalar just read is a key: its colon follows.
  bool is_key() {
    skip_spaces();
    return peek() == ':' && is_blank(peek(1));
  }

  // Parses a value in block style.
  Node block(int level) {
    if (is_dash()) return list(level);
    if (is_in(peek(), "[{")) {
      Node found = flow(level);
      if (is_key()) fail("a key must be a word");
      return found;
    }
    const int column = this->column();
    Node found = word(false);
    if (is_key()) return mapping(std::move(found), column, level);
    return found;
  }

  Node mapping(Node key, int column, int level) {
    Node found = collection(Node::Kind::kMapping, level);
    found.line = key.line;
    for (;;) {
      ++pos_;  // the colon
      add(found, key, value_of_key(column, level + 1));
      skip();
      if (at_end() || this->column() < column || (this->column() == column && is_dash())) return found;
      if (this->column() > column) fail("it is indented further than the key before it");
      key = word(false);
      if (!is_key()) fail("expected 'key: value', found '" + shortened(key.word, kMostOfAToken) + "'");
    }
  }

  Node value_of_key(int column, int level) {
    const int line = line_;
    skip();
    if (at_end() || line_ != line) {
      const bool is_there = !at_end() && (this->column() > column || (this->column() == column && is_dash()));
      return is_there ? block(level) : Node{};
    }
    if (is_dash()) fail("a list begins on a line of its own");
    Node found = is_in(peek(), "[{") ? flow(level) : word(false);
    if (is_key()) fail("'" + shortened(found.word, kMostOfAToken) + ":' is a second key in a line: put it in quotes");
    return found;
  }

  Node list(int level) {
    Node found = collection(Node::Kind::kList, level);
    const int column = this->column();
    while (!at_end() && this->column() == column && is_dash()) {
      const int line = line_;
      ++pos_;
      skip();
      Node item;
      if (!at_end() && (line_ == line || this->column() > column)) item = block(level + 1);
      item.line = line;
      found.items.push_back(std::move(item));
      skip();
      if (!at_end() && this->column() > column) fail("it is indented further than the '-' before it");
    }
    return found;
  }

  // Parses a value in flow style.
  Node flow(int level) {
    if (peek() == '{') return flow_mapping(level);
    if (peek() == '[') return flow_list(level);
    return word(true);
  }

  Node flow_mapping(int level) {
    Node found = collection(Node::Kind::kMapping, level);
    const int begin = line_;
    ++pos_;
    for (skip(); peek() != '}'; end_of_item('}', begin)) {
      const Node key = word(true);
      skip();
      if (peek() != ':') fail("expected ': value' behind '" + shortened(key.word, kMostOfAToken) + "'");
      ++pos_;
      skip();
      Node value;
      if (!is_in(peek(), ",}")) value = flow(level + 1);
      add(found, key, std::move(value));
    }
    ++pos_;
    return found;
  }

  Node flow_list(int level) {
    Node found = collection(Node::Kind::kList, level);
    const int begin = line_;
    ++pos_;
    for (skip(); peek() != ']'; end_of_item(']', begin)) found.items.push_back(flow(level + 1));
    ++pos_;
    return found;
  }

  void end_of_item(char close, int begin) {
    skip();
    if (peek() == ',') {
      ++pos_;
      skip();
    } else if (peek() != close) {
      fail(std::string("expected ',' or '") + close + "' for what begins in line " + std::to_string(begin));
    }
  }

  Node collection(Node::Kind kind, int level) const {
    if (level == kMaxLevels) fail("more than " + std::to_string(kMaxLevels) + " levels");
    Node found;
    found.kind = kind;
    found.line = line_;
    return found;
  }

  static void add(Node& mapping, const Node& key, Node value) {
    if (const Node* const before = mapping.find(key.word)) {
      throw FileError(
          "'" + shortened(key.word, kMostOfAValue) + "' stands in line " + std::to_string(before->line) + " already",
          key.line);
    }
    value.line = key.line;
    mapping.entries.emplace_back(key.word, std::move(value));
  }

  Node word(bool in_flow) {
    const char c = peek();
    if (c == '&' || c == '*') fail("aliases (" + token() + ") are not allowed: write it out");
    if (c == '!') fail("tags (" + token() + ") are not allowed");
    if (c == '|' || c == '>') fail("blocks of text (| and >) are not allowed: write it in quotes");
    if (is_in(c, "[{") || (c == '?' && (in_flow || is_blank(peek(1))))) fail("a key must be a word");
    if (is_in(c, ",]}%@`") || is_dash() || (c == ':' && is_blank(peek(1))))
      fail(std::string("a word cannot begin with ") + c);
    Node found;
    found.line = line_;
    found.is_quoted = c == '\'' || c == '"';
    found.word = found.is_quoted ? in_quotes(c) : plain(in_flow);
    return found;
  }

  // Plain scalar; ends at the end of its line at the latest.
  std::string plain(bool in_flow) {
    const size_t begin = pos_;
    for (; !at_line_end(); ++pos_) {
      const char next = peek(1);
      if (peek() == ':' && (is_blank(next) || (in_flow && is_in(next, kFlow)))) break;
      if (peek() == '#' && pos_ > begin && is_blank(text_[pos_ - 1])) break;
      if (in_flow && is_in(peek(), kFlow)) break;
    }
    std::string_view found = text_.substr(begin, pos_ - begin);
    while (!found.empty() && is_blank(found.back())) found.remove_suffix(1);
    return std::string(found);
  }

  std::string in_quotes(char quote) {
    ++pos_;
    std::string found;
    for (;; ++pos_) {
      if (at_line_end()) fail(std::string("the quote ") + quote + " has no end in its line");
      const char c = peek();
      if (c == quote && (quote == '"' || peek(1) != quote)) break;
      if (c == quote || (c == '\\' && quote == '"')) ++pos_;
      found += c == '\\' && quote == '"' ? escaped() : c;
    }
    ++pos_;
    return found;
  }

  // Value of an escape sequence.
  char escaped() const {
    if (!is_in(peek(), "t\"/\\ ")) fail(std::string("\\") + peek() + " is not allowed in quotes");
    return peek() == 't' ? '\t' : peek();
  }

  std::string_view text_;
  size_t pos_ = 0;
  size_t line_start_ = 0;
  int line_ = 1;
};

std::string written(const Node& node) {
  if (node.kind == Node::Kind::kWord) {
    const bool is_constant = node.is_null() || node.word == "true" || node.word == "false" || node.number();
    return !node.is_quoted && is_constant ? node.word : "'" + node.word + "'";
  }
  std::string found;
  const auto append = [&](const std::string& text) { found += (found.empty() ? "" : ", ") + text; };
  for (const Node& item : node.items) append(written(item));
  for (const auto& [key, value] : node.entries) append(key + ": " + written(value));
  return node.kind == Node::Kind::kList ? "[" + found + "]" : "{" + found + "}";
}

}  // namespace

bool Node::is_null() const {
  return kind == Kind::kWord && !is_quoted && (word.empty() || word == "null" || word == "~");
}

std::optional<uint64_t> Node::whole_number() const {
  uint64_t found = 0;
  const char* const end = word.data() + word.size();
  const auto [last, error] = std::from_chars(word.data(), end, found);
  const bool is_octal = word.size() > 1 && word[0] == '0';
  if (kind != Kind::kWord || is_quoted || is_octal || error != std::errc() || last != end) return std::nullopt;
  return found;
}

std::optional<double> Node::number() const {
  double found = 0;
  const char* const end = word.data() + word.size();
  const auto [last, error] = std::from_chars(word.data(), end, found);
  const bool is_number = error == std::errc() && last == end && word.find_first_of("0123456789") < 2;
  if (kind != Kind::kWord || is_quoted || !is_number) return std::nullopt;
  // YAML numbers that are not whole have a dot.
  return word.find_first_not_of("-0123456789") == std::string::npos || is_in('.', word) ? std::optional(found)
                                                                                        : std::nullopt;
}

const Node* Node::find(std::string_view key) const {
  const auto found =
      std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return entry.first == key; });
  return found == entries.end() ? nullptr : &found->second;
}

std::string read_file(const std::string& path) {
  if (path.find('\0') != std::string::npos) throw FileError("the name of a file has no NUL");
  struct stat status{};
  if (stat(path.c_str(), &status) != 0) throw FileError(std::strerror(errno));
  // A pipe or terminal would block, and its data would be gone for the second rank that reads it.
  if (!S_ISREG(status.st_mode)) throw FileError("it is no ordinary file");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw FileError(std::strerror(errno));
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) throw FileError("it has more than " + std::to_string(kMaxFileBytes) + " bytes");
  return text;
}

Node read_yaml(std::string_view text) { return Reader(text).document(); }

std::string shown(const Node& node) { return node.is_null() ? "null" : shortened(written(node), kMostOfAValue); }

std::string shortened(std::string text, size_t most) {
  if (text.size() <= most) return text;
  const std::string length = std::to_string(text.size());
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;  // do not cut a UTF-8 character
  text.resize(most);
  return text + "... (" + length + " bytes)";
}

}  // namespace llm_comm::host
