// Serialization of messages between ranks: numbers, and texts preceded by their length. The reader validates its input.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace llm_comm::nccl {

class Writer {
 public:
  Writer& number(uint64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  Writer& text(std::string_view value) {
    number(value.size());
    bytes_.append(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Throws std::invalid_argument if the message is too short.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  uint64_t number() {
    uint64_t value = 0;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string text() {
    const uint64_t length = number();
    return std::string(take(length));
  }
  // Throws if bytes are left.
  void end() const {
    if (!left_.empty()) throw std::invalid_argument("a message of a rank is longer than it should be");
  }

 private:
  std::string_view take(uint64_t bytes) {
    if (bytes > left_.size()) throw std::invalid_argument("a message of a rank is cut off");
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }

  std::string_view left_;
};

}  // namespace llm_comm::nccl
