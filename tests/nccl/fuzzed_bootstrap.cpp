// Fuzzed bootstrap: while ranks connect to the hub, unknown senders and senders that know the secret send random bytes
// and cut their connections at random times. Every reader of messages, ids and tuning tables also gets damaged input.
// Nothing may crash or hang, and communicators that no rank disturbs must work.
// Usage: fuzzed_bootstrap [<rounds> [<seed>]].
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "host/tables.h"
#include "host/yaml.h"
#include "nccl/agreement.h"
#include "nccl/bootstrap.h"
#include "nccl/failure.h"
#include "nccl/hub.h"
#include "nccl/interface.h"
#include "nccl/unique_id.h"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::nccl;  // NOLINT

std::atomic<int> failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::printf("%s\n", what);
}

std::string bytes_of(std::mt19937& random, size_t most) {
  std::string bytes(random() % (most + 1), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

Descriptor connect_to(const HubAddress& hub_address) {
  Descriptor socket(::socket(hub_address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&hub_address.address), length_of(hub_address.address)) !=
      0) {
    return Descriptor();
  }
  return socket;
}

void send_some(const Descriptor& socket, const std::string& bytes) {
  if (socket) (void)!send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Somebody without the secret: nothing he does may matter.
void disturb(const HubAddress& hub_address, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Descriptor> open;
  for (int i = 0; i < 20; ++i) {
    Descriptor socket = connect_to(hub_address);
    if (random() % 2 == 0) {
      Hello hello{Hello::kMagic, hub_address.secret, static_cast<uint32_t>(random() % 4),
                  static_cast<uint32_t>(random() % 4)};
      hello.secret[random() % hello.secret.size()] ^= static_cast<unsigned char>(1 << random() % 8);
      std::string bytes(reinterpret_cast<const char*>(&hello), sizeof(hello));
      bytes.resize(random() % 4 == 0 ? random() % bytes.size() : bytes.size());
      send_some(socket, bytes);
    }
    if (random() % 2 == 0) send_some(socket, bytes_of(random, 6000));
    if (random() % 2 == 0) open.push_back(std::move(socket));
  }
  usleep(random() % 20000);
}

void ranks_meet(uint32_t seed) {
  constexpr int kWorld = 3;
  const HubAddress hub_address = open_hub(std::nullopt, 20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back(disturb, hub_address, seed + static_cast<uint32_t>(i));
  for (int rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937 random(seed + 10);  // alike on all ranks
      try {
        Bootstrap bootstrap(hub_address, rank, kWorld, 20);
        for (int round = 0; round < 5; ++round) {
          const std::string message = bytes_of(random, kMaxMessageBytes - 1) + std::to_string(rank);
          const auto all = bootstrap.exchange(message);
          expect(all.size() == kWorld && all[static_cast<size_t>(rank)] == message,
                 "a message of a rank is not its own");
          expect(all[0].size() == message.size(), "a message of another rank has another length");
        }
      } catch (const std::exception& error) {
        expect(false, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The answer to an exchange that has failed is not taken for that of the next one.
void rank_is_late() {
  constexpr double kLimitS = 2;
  const HubAddress hub_address = open_hub(std::nullopt, 20);
  std::atomic<bool> may_answer = false;
  std::thread late([&] {
    Bootstrap bootstrap(hub_address, 1, 2, 20);
    while (!may_answer) usleep(1000);
    try {
      bootstrap.exchange("late");
    } catch (const Failure&) {
    }
  });
  Bootstrap bootstrap(hub_address, 0, 2, kLimitS);
  for (const char* const message : {"in time", "too soon"}) {
    try {
      bootstrap.exchange(message);
      expect(false, "an exchange ends without a rank, or after one that failed");
    } catch (const Failure&) {
    }
    may_answer = true;
  }
  late.join();
}

// A rank that goes mad: the others must get an error, and soon.
void rank_is_hostile(uint32_t seed) {
  const HubAddress hub_address = open_hub(std::nullopt, 10);
  std::atomic<bool> has_ended = false;
  std::thread victim([&] {
    try {
      Bootstrap bootstrap(hub_address, 0, 2, 10);
      for (int round = 0; round < 1000; ++round) bootstrap.exchange("a message");
    } catch (const Failure&) {
      has_ended = true;
    }
  });
  std::mt19937 random(seed);
  Descriptor socket = connect_to(hub_address);
  const Hello hello{Hello::kMagic, hub_address.secret, 1, 2};
  send_some(socket, std::string(reinterpret_cast<const char*>(&hello), sizeof(hello)));
  for (int i = 0; i < 5; ++i) send_some(socket, bytes_of(random, 300));
  usleep(random() % 5000);
  socket = Descriptor();
  victim.join();
  expect(has_ended, "a rank goes on without the other one");
}

std::string damaged(std::string text, std::mt19937& random) {
  for (uint32_t i = 1 + random() % 4; i > 0 && !text.empty(); --i) {
    const size_t at = random() % text.size();
    switch (random() % 4) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, 1 + random() % 30);
        break;
      case 2:
        text.insert(at, bytes_of(random, 20));
        break;
      default:
        text.insert(at, text.substr(random() % text.size(), random() % 60));
    }
  }
  return text;
}

void readers_get_damaged_input(std::mt19937& random) {
  Entry entry;
  entry.host = "host";
  entry.table = "table";
  try {
    Entry::from(damaged(entry.bytes(), random));
  } catch (const std::invalid_argument&) {
  }
  ncclUniqueId id;
  for (char& byte : id.internal) byte = static_cast<char>(random());
  if (random() % 2 == 0) std::memcpy(id.internal, "LLMCOMM\1", 8);
  from_id(id);
  const auto& tables = host::embedded_tables();
  const std::string text = tables[random() % tables.size()].text;
  const size_t first_rows = text.find("rows:");
  try {
    host::parse_table("damaged", damaged(text.substr(0, first_rows + 600), random));
  } catch (const host::FileError&) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t rounds = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 20;
  const uint32_t seed = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 1;
  std::mt19937 random(seed);
  rank_is_late();
  for (uint32_t round = 0; round < rounds; ++round) {
    ranks_meet(seed + round * 100);
    rank_is_hostile(seed + round * 100);
    for (int i = 0; i < 200; ++i) readers_get_damaged_input(random);
  }
  return failures == 0 ? 0 : 1;
}
