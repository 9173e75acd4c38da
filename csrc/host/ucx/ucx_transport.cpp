#include "host/ucx/ucx_transport.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "llm_comm/workspace_layout.h"

namespace llm_comm::host {

namespace {

using std::chrono::steady_clock;

// Limits of the shutdown: for puts to arrive, for peers to end, and for UCX to close connections.
constexpr auto kLongestFlush = std::chrono::seconds(10);
constexpr auto kLongestFarewell = std::chrono::seconds(1);
constexpr auto kLongestClose = std::chrono::seconds(1);
// Progress rounds before the proxy looks for requests again.
constexpr int kMostRounds = 64;

constexpr uint32_t kAddressMark = 0x31584355;  // "UCX1"

// Head of address(). The worker address and two keys follow, each after its length.
struct Head {
  uint32_t mark;
  uint32_t zero;
  uint64_t memory;
  uint64_t bytes;
  uint64_t farewells;
};

void append(std::string& all, const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  all.append(reinterpret_cast<const char*>(&length), sizeof(length));
  all += text;
}

std::string take(const std::string& all, size_t& at) {
  uint32_t length = 0;
  if (all.size() - at < sizeof(length)) throw std::runtime_error("the address of a peer is too short");
  std::memcpy(&length, all.data() + at, sizeof(length));
  at += sizeof(length);
  if (all.size() - at < length) throw std::runtime_error("the address of a peer is too short");
  at += length;
  return all.substr(at - length, length);
}

uint64_t as_number(const void* address) { return reinterpret_cast<uint64_t>(address); }

}  // namespace

// A put that UCX has not completed.
struct UcxTransport::Sent {
  Lane* lane;
  const ucp::Functions* ucp;
  uint64_t word;  // the data, if it is a single word that the caller need not keep

  static void end(void* request, ucp::Status status, void* user_data) {
    const std::unique_ptr<Sent> sent(static_cast<Sent*>(user_data));
    --sent->lane->pending;
    if (status != ucp::kOk && sent->lane->error == ucp::kOk) sent->lane->error = status;
    sent->ucp->request_free(request);
  }
};

UcxTransport::UcxTransport(char* memory, uint64_t bytes)
    : ucp_(ucp::functions()), memory_(memory), bytes_(bytes), farewells_(std::make_unique<uint64_t[]>(kMaxWorldSize)) {
  try {
    set_up();
  } catch (...) {
    tear_down();
    throw;
  }
}

UcxTransport::~UcxTransport() { tear_down(); }

void UcxTransport::set_up() {
  ucp::Options* options = nullptr;
  check(ucp_.config_read(nullptr, nullptr, &options), "ucp_config_read");
  // All memory is host memory, so CUDA transports are excluded.
  if (std::getenv("UCX_TLS") == nullptr) ucp_.config_modify(options, "TLS", "^cuda");
  ucp::Params params{};
  params.field_mask = ucp::kParamsHaveFeatures;
  params.features = ucp::kFeatureRma;
  const ucp::Status status = ucp_.init_version(1, 14, &params, options, &context_);
  ucp_.config_release(options);
  check(status, "ucp_init");
  ucp::WorkerParams of_worker{};
  of_worker.field_mask = ucp::kWorkerParamsHaveThreadMode;
  of_worker.thread_mode = ucp::kThreadsInTurn;
  check(ucp_.worker_create(context_, &of_worker, &worker_), "ucp_worker_create");
  registered_ = register_memory(memory_, bytes_);
  registered_farewells_ = register_memory(farewells_.get(), kMaxWorldSize * sizeof(uint64_t));
}

// Closes everything within kLongestClose. Leaks what does not end in time.
void UcxTransport::tear_down() {
  const auto deadline = steady_clock::now() + kLongestClose;
  bool has_ended = true;
  for (const auto& lane : lanes_) {
    if (lane == nullptr) continue;
    for (const LocalCompletion& completion : lane->local_completions) {
      if (completion.flush != nullptr) ucp_.request_free(completion.flush);
    }
    for (const ucp::RemoteKey key : {lane->key_of_memory, lane->key_of_farewells}) {
      if (key != nullptr) ucp_.rkey_destroy(key);
    }
    if (lane->endpoint == nullptr) continue;
    ucp::RequestParam by_force{};
    by_force.op_attr_mask = ucp::kRequestHasFlags;
    by_force.flags = ucp::kCloseByForce;
    const ucp::StatusPointer closed = ucp_.ep_close_nbx(lane->endpoint, &by_force);
    if (closed == nullptr || ucp::is_error(closed)) continue;
    has_ended &= wait_until([&] { return ucp_.request_check_status(closed) != ucp::kInProgress; }, deadline);
    ucp_.request_free(closed);
  }
  for (const auto& lane : lanes_) {
    if (lane != nullptr) has_ended &= wait_until([&] { return lane->pending == 0; }, deadline);
  }
  for (ucp::Memory* const registered : {&registered_, &registered_farewells_}) {
    if (*registered != nullptr) ucp_.mem_unmap(context_, std::exchange(*registered, nullptr));
  }
  if (!has_ended) {
    for (auto& lane : lanes_)
      static_cast<void>(lane.release());  // callbacks may still run while the worker is destroyed
  }
  if (worker_ != nullptr) ucp_.worker_destroy(std::exchange(worker_, nullptr));
  if (context_ != nullptr) ucp_.cleanup(std::exchange(context_, nullptr));
  lanes_.clear();
}

void UcxTransport::check(ucp::Status status, const char* what) const {
  if (status == ucp::kOk) return;
  throw std::runtime_error(std::string("UCX: ") + what + ": " + ucp_.status_string(status));
}

ucp::Memory UcxTransport::register_memory(void* memory, uint64_t bytes) const {
  ucp::MapParams params{};
  params.field_mask = ucp::kMapHasAddress | ucp::kMapHasLength | ucp::kMapHasMemoryType;
  params.address = memory;
  params.length = bytes;
  params.memory_type = ucp::kHostMemory;
  ucp::Memory registered = nullptr;
  check(ucp_.mem_map(context_, &params, &registered), "ucp_mem_map");
  return registered;
}

std::string UcxTransport::key_of(ucp::Memory memory) const {
  void* buffer = nullptr;
  size_t bytes = 0;
  check(ucp_.rkey_pack(context_, memory, &buffer, &bytes), "ucp_rkey_pack");
  const std::string key(static_cast<const char*>(buffer), bytes);
  ucp_.rkey_buffer_release(buffer);
  return key;
}

std::string UcxTransport::address() const {
  ucp::WorkerAttr attributes{};
  attributes.field_mask = ucp::kWorkerAttrHasAddress;
  check(ucp_.worker_query(worker_, &attributes), "ucp_worker_query");
  const std::string of_worker(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucp_.worker_release_address(worker_, attributes.address);
  const Head head{kAddressMark, 0, as_number(memory_), bytes_, as_number(farewells_.get())};
  std::string all(reinterpret_cast<const char*>(&head), sizeof(head));
  append(all, of_worker);
  append(all, key_of(registered_));
  append(all, key_of(registered_farewells_));
  return all;
}

void UcxTransport::connect(uint32_t rank, const std::vector<Peer>& peers, std::function<bool()> has_failed) {
  if (peers.size() > kMaxWorldSize || rank >= peers.size()) {
    throw std::runtime_error("UCX: rank " + std::to_string(rank) + " of " + std::to_string(peers.size()) +
                             ": it serves up to " + std::to_string(kMaxWorldSize));
  }
  has_failed_ = std::move(has_failed);
  for (uint32_t peer = 0; peer < peers.size(); ++peer) {
    lanes_.push_back(std::make_unique<Lane>());
    lanes_[peer]->name = peers[peer].name;
    lanes_[peer]->memory = memory_;
    if (peer != rank) connect(*lanes_[peer], rank, peers[peer].address);
  }
}

void UcxTransport::connect(Lane& lane, uint32_t rank, const std::string& address) {
  Head head{};
  if (address.size() < sizeof(head)) throw std::runtime_error("the address of " + lane.name + " is too short");
  std::memcpy(&head, address.data(), sizeof(head));
  if (head.mark != kAddressMark || head.bytes != bytes_) {
    throw std::runtime_error("the address of " + lane.name + " is of " + std::to_string(head.bytes) +
                             " bytes of memory, not of " + std::to_string(bytes_) +
                             ": all ranks need one version of llm_comm");
  }
  size_t at = sizeof(head);
  const std::string of_worker = take(address, at);
  const std::string of_memory = take(address, at);
  const std::string of_farewells = take(address, at);
  lane.memory = reinterpret_cast<char*>(head.memory);
  lane.farewell = head.farewells + rank * sizeof(uint64_t);
  ucp::EndpointParams params{};
  params.field_mask = ucp::kEndpointHasAddress | ucp::kEndpointHasErrorMode | ucp::kEndpointHasErrorHandler;
  params.address = reinterpret_cast<const ucp::WorkerAddress*>(of_worker.data());
  params.error_mode = ucp::kErrorsOfPeers;
  params.error_handler.argument = &lane;
  params.error_handler.call = [](void* argument, ucp::Endpoint, ucp::Status status) {
    auto* const failed = static_cast<Lane*>(argument);
    if (failed->error == ucp::kOk) failed->error = status;
  };
  const std::string what = "connection to " + lane.name;
  check(ucp_.ep_create(worker_, &params, &lane.endpoint), what.c_str());
  check(ucp_.ep_rkey_unpack(lane.endpoint, of_memory.data(), &lane.key_of_memory), what.c_str());
  check(ucp_.ep_rkey_unpack(lane.endpoint, of_farewells.data(), &lane.key_of_farewells), what.c_str());
}

// ---- Calls of the proxy ------------------------------------------------------------------------------------------

void UcxTransport::put(uint32_t peer, char* to, const char* from, uint64_t bytes) {
  Lane& lane = open_lane(peer);
  const Range range{as_number(to), as_number(to) + bytes};
  const auto overlaps = [&](const Range& other) { return range.begin < other.end && other.begin < range.end; };
  if (std::any_of(lane.unfenced.begin(), lane.unfenced.end(), overlaps)) fence();
  lane.unfenced.push_back(range);
  const bool is_registered = from >= memory_ && from + bytes <= memory_ + bytes_;
  send(lane, from, bytes, range.begin, lane.key_of_memory, is_registered ? registered_ : nullptr,
       std::make_unique<Sent>(Sent{&lane, &ucp_, 0}));
}

void UcxTransport::signal(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) {
  Lane& lane = open_lane(peer);
  if (!lane.unfenced.empty()) fence();
  for (uint32_t i = 0; i < count; ++i) send_word(lane, values[i], as_number(to + i), lane.key_of_memory);
  lane.unfenced.push_back({as_number(to), as_number(to + count)});
}

void UcxTransport::notify_local_completion(uint32_t peer, uint64_t* to, const uint64_t* values, uint32_t count) {
  Lane& lane = open_lane(peer);
  const ucp::RequestParam param{};
  const ucp::StatusPointer flush = ucp_.ep_flush_nbx(lane.endpoint, &param);
  if (ucp::is_error(flush)) fail(lane, ucp::status_of(flush));
  lane.local_completions.push_back({flush, to, {values, values + count}});
  poll_local_completions(lane);
}

bool UcxTransport::progress() {
  const bool has_advanced = advance();
  for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
    Lane& lane = *lanes_[peer];
    if (lane.error != ucp::kOk && !has_said_farewell(peer)) fail(lane, lane.error);
    if (!lane.local_completions.empty()) poll_local_completions(lane);
  }
  return has_advanced;
}

void UcxTransport::begin(uint32_t) {
  if (worker_ == nullptr) throw std::runtime_error("UCX: the connections have been ended");
}

// Closes the connections here and not in the destructor, so that peers that still wait notice.
void UcxTransport::finish() {
  if (!has_thrown_ && !(has_failed_ && has_failed_())) say_farewell();
  tear_down();
}

// Ends the connections with an exchange of farewells. A flush needs the peer to be alive, so a rank waits until its
// peers have sent their farewells, at most kLongestFarewell.
void UcxTransport::say_farewell() {
  std::vector<void*> flushes;
  for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
    if (!is_live(peer)) continue;
    const ucp::RequestParam param{};
    const ucp::StatusPointer flush = ucp_.ep_flush_nbx(lanes_[peer]->endpoint, &param);
    if (flush != nullptr && !ucp::is_error(flush)) flushes.push_back(flush);
  }
  const auto is_pending = [&](void* flush) { return ucp_.request_check_status(flush) == ucp::kInProgress; };
  wait_until([&] { return std::none_of(flushes.begin(), flushes.end(), is_pending); },
             steady_clock::now() + kLongestFlush);
  for (void* const flush : flushes) ucp_.request_free(flush);
  for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
    if (is_live(peer)) send_word(*lanes_[peer], 1, lanes_[peer]->farewell, lanes_[peer]->key_of_farewells);
  }
  const auto is_done = [&] {
    for (uint32_t peer = 0; peer < lanes_.size(); ++peer) {
      if (lanes_[peer]->error == ucp::kOk && lanes_[peer]->pending != 0) return false;
      if (is_live(peer) && !has_said_farewell(peer)) return false;
    }
    return true;
  };
  wait_until(is_done, steady_clock::now() + kLongestFarewell);
}

// ---- Helpers -------------------------------------------------------------------------------------------------------

UcxTransport::Lane& UcxTransport::open_lane(uint32_t peer) {
  Lane& lane = *lanes_.at(peer);
  if (lane.error != ucp::kOk) fail(lane, lane.error);
  if (lane.endpoint == nullptr) throw std::runtime_error("UCX: " + lane.name + " is this rank itself");
  return lane;
}

// Fences all peers: UCX has no fence for a single endpoint.
void UcxTransport::fence() {
  check(ucp_.worker_fence(worker_), "ucp_worker_fence");
  for (const auto& lane : lanes_) lane->unfenced.clear();
}

void UcxTransport::send(Lane& lane, const void* from, uint64_t bytes, uint64_t to, ucp::RemoteKey key, ucp::Memory own,
                        std::unique_ptr<Sent> sent) {
  ucp::RequestParam param{};
  param.op_attr_mask = ucp::kRequestHasCallback | ucp::kRequestHasUserData;
  param.callback = &Sent::end;
  param.user_data = sent.get();
  if (own != nullptr) {
    param.op_attr_mask |= ucp::kRequestHasMemory;
    param.memory = own;
  }
  const ucp::StatusPointer result = ucp_.put_nbx(lane.endpoint, from, bytes, to, key, &param);
  if (result == nullptr) return;
  if (ucp::is_error(result)) {
    if (lane.error == ucp::kOk) lane.error = ucp::status_of(result);
    return;  // reported by progress()
  }
  ++lane.pending;
  static_cast<void>(sent.release());  // freed in its callback
}

void UcxTransport::send_word(Lane& lane, uint64_t value, uint64_t to, ucp::RemoteKey key) {
  auto sent = std::make_unique<Sent>(Sent{&lane, &ucp_, value});
  const uint64_t* const word = &sent->word;
  send(lane, word, sizeof(value), to, key, nullptr, std::move(sent));
}

bool UcxTransport::advance() {
  bool has_advanced = false;
  for (int round = 0; round < kMostRounds && ucp_.worker_progress(worker_) != 0; ++round) has_advanced = true;
  return has_advanced;
}

bool UcxTransport::has_said_farewell(uint32_t peer) const {
  return __atomic_load_n(&farewells_[peer], __ATOMIC_ACQUIRE) != 0;
}

bool UcxTransport::is_live(uint32_t peer) const {
  return lanes_[peer]->endpoint != nullptr && lanes_[peer]->error == ucp::kOk;
}

// Completes local completions in order, because several may write the same word.
void UcxTransport::poll_local_completions(Lane& lane) {
  while (!lane.local_completions.empty()) {
    const LocalCompletion& completion = lane.local_completions.front();
    if (completion.flush != nullptr) {
      const ucp::Status status = ucp_.request_check_status(completion.flush);
      if (status == ucp::kInProgress) return;
      if (status != ucp::kOk) fail(lane, status);
      ucp_.request_free(completion.flush);
    }
    for (size_t i = 0; i < completion.values.size(); ++i)
      __atomic_store_n(completion.to + i, completion.values[i], __ATOMIC_RELEASE);
    lane.local_completions.pop_front();
  }
}

void UcxTransport::fail(const Lane& lane, ucp::Status status) {
  has_thrown_ = true;
  throw std::runtime_error("UCX: the connection to " + lane.name + " has ended: " + ucp_.status_string(status));
}

template <class Done>
bool UcxTransport::wait_until(Done done, steady_clock::time_point deadline) {
  while (!done()) {
    if (steady_clock::now() >= deadline) return false;
    if (!advance()) sched_yield();
  }
  return true;
}

}  // namespace llm_comm::host
