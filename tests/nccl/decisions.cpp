// What follows from what ranks have said, and from variables: pure functions of the NCCL library.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "host/planner.h"
#include "nccl/agreement.h"
#include "nccl/failure.h"
#include "nccl/interface.h"
#include "nccl/options.h"
#include "nccl/selection.h"
#include "nccl/unique_id.h"

namespace {

using namespace llm_comm;        // NOLINT: a test of it
using namespace llm_comm::nccl;  // NOLINT

int failures = 0;

#define EXPECT(condition) expect((condition), #condition, __LINE__)
void expect(bool holds, const char* what, int line) {
  if (holds) return;
  ++failures;
  std::printf("decisions.cpp:%d: %s does not hold\n", line, what);
}

// ---- Agreement ----

std::vector<Entry> alike(size_t world) {
  std::vector<Entry> entries(world);
  for (size_t rank = 0; rank < world; ++rank) {
    entries[rank].host = "host";
    entries[rank].device = "GPU";
    entries[rank].uuid = "uuid " + std::to_string(rank);
    entries[rank].sm_count = 132;
    entries[rank].has_real_library = true;
  }
  return entries;
}

// Why a world is not served in which one entry is changed; "failure ..." where there is no communicator.
std::string why(size_t world, const std::function<void(Entry&)>& change, bool is_offered_real = true) {
  std::vector<Entry> entries = alike(world);
  change(entries.back());
  for (Entry& entry : entries) entry = Entry::from(entry.bytes());
  try {
    return agree(entries, is_offered_real).why_not_served;
  } catch (const Failure& failure) {
    return std::string("failure: ") + failure.what();
  }
}

bool begins(const std::string& text, const std::string& with) { return text.rfind(with, 0) == 0; }

void agreements() {
  const auto nothing = [](Entry&) {};
  EXPECT(why(2, nothing).empty());
  EXPECT(why(16, nothing).empty());
  EXPECT(begins(why(17, nothing), "17 ranks"));
  EXPECT(begins(why(1, nothing), "one rank"));
  EXPECT(begins(why(3, [](Entry& of) { of.host = "other"; }), "rank 2: it is on another host"));
  EXPECT(begins(why(3, [](Entry& of) { of.device = "another"; }), "rank 2: its device is another"));
  EXPECT(begins(why(3, [](Entry& of) { of.options = "timeout_s 3"; }), "rank 2: its options"));
  EXPECT(begins(why(3, [](Entry& of) { of.table = "mine"; }), "rank 2: its tuning table"));
  EXPECT(begins(why(3, [](Entry& of) { of.is_enabled = false; }), "rank 2: LLM_COMM_ENABLE"));
  EXPECT(begins(why(3, [](Entry& of) { of.uuid = "uuid 0"; }), "rank 2: it has the GPU of rank 0"));
  EXPECT(why(3, [](Entry& of) { of.uuid = "uuid 0", of.share_gpu = true; }).empty());
  EXPECT(begins(why(3, [](Entry& of) { of.has_real_library = false; }), "failure: some ranks"));
  EXPECT(begins(why(3, [](Entry& of) { of.objection = "no"; }), "failure: rank 2: no"));
  // Nobody is left to do it.
  EXPECT(begins(why(17, nothing, false), "failure: llm_comm does not serve"));
  EXPECT(why(2, nothing, false).empty());
  std::vector<Entry> entries = alike(2);
  entries[1].sm_count = 100;
  EXPECT(agree(entries, true).limits.sm_count == 100);
  EXPECT(agree(entries, true).uses_real_library);
  EXPECT(!agree(entries, false).uses_real_library);
  // However long what a rank has to say is, it is a message that is taken.
  Entry long_one;
  for (std::string* text : {&long_one.host, &long_one.name, &long_one.device, &long_one.uuid, &long_one.options,
                            &long_one.table, &long_one.objection}) {
    *text = std::string(100000, 'x');
  }
  EXPECT(long_one.bytes().size() <= kMaxMessageBytes);
}

// ---- Selection ----

void selections() {
  const Limits limits{8 << 20, 132, 16, 90, 16 << 20};
  const Table table = find_table("", "NVIDIA H100 80GB HBM3", 2, 132, 90);
  EXPECT(table.name == "tune_h100_2.yaml");
  EXPECT(find_table("", "NVIDIA H100 80GB HBM3", 8, 132, 90).name == "tune_h200_8.yaml, nearest: H200");
  EXPECT(find_table("", "NVIDIA H100 80GB HBM3", 8, 114, 90).name == "general table");
  const Selection selection(table, 2, limits, false);
  const Selection of_all(table, 2, limits, true);
  const auto name = [&](const Selection& by, const Message& message) {
    const Decision decision = by.decide(message);
    const std::vector<uint32_t> loaded = by.algorithms();
    EXPECT(!decision.plan || std::count(loaded.begin(), loaded.end(), decision.plan->algorithm) != 0);
    return decision.plan ? std::string(host::algorithms()[decision.plan->algorithm].info->name) : "";
  };
  EXPECT(name(selection, {Operation::kAllReduce, ncclBfloat16, 512}) == "one_shot");
  EXPECT(name(selection, {Operation::kAllReduce, ncclBfloat16, 3 << 20}) == "two_shot");
  EXPECT(name(selection, {Operation::kAllReduce, ncclFloat32, 64 << 20}) == "two_shot_hb");
  EXPECT(name(selection, {Operation::kAllReduce, ncclFloat32, (64 << 20) + 1}).empty());
  EXPECT(name(of_all, {Operation::kAllReduce, ncclFloat32, (64 << 20) + 1}) == "two_shot_hb");
  for (const int reduction : {1, 2, 3, 4, 5, 100}) {
    EXPECT(name(of_all, {Operation::kAllReduce, ncclFloat32, 8, reduction}).empty());
    EXPECT(name(of_all, {Operation::kReduceScatter, ncclFloat32, 8, reduction}).empty());
  }
  for (int type = 0; type < ncclNumTypes; ++type) {
    const auto of = static_cast<ncclDataType_t>(type);
    const bool is_summed = of == ncclFloat16 || of == ncclFloat32 || of == ncclBfloat16;
    EXPECT(name(selection, {Operation::kAllReduce, of, 8}).empty() == !is_summed);
    EXPECT(name(selection, {Operation::kReduceScatter, of, 8}).empty() == !is_summed);
    EXPECT(!name(selection, {Operation::kAllGather, of, 8}).empty());
    EXPECT(!name(selection, {Operation::kAllToAll, of, 8}).empty());
    EXPECT(!name(selection, {Operation::kBroadcast, of, 8, ncclSum, 1}).empty());
  }
  EXPECT(!name(selection, {Operation::kBroadcast, ncclInt8, 8 << 20}).empty());
  // The table has no row of all-to-all.
  EXPECT(!name(selection, {Operation::kAllToAll, ncclInt8, 1 << 20}).empty());
  EXPECT(name(selection, {Operation::kAllToAll, ncclInt8, (1 << 20) + 1}).empty());
  EXPECT(!name(of_all, {Operation::kAllToAll, ncclInt8, (1 << 20) + 1}).empty());
  EXPECT(name(selection, {Operation::kBroadcast, ncclInt8, (8 << 20) + 1}).empty());
  Table other = table;
  other.rows.back().us.word = "3";
  EXPECT(digest_of(other) == digest_of(table));
  other.rows.back().tuning.depth += 1;
  EXPECT(digest_of(other) != digest_of(table));
  const Table general = find_table("", "a GPU of nobody", 8, 132, 90);
  EXPECT(name(Selection(general, 8, limits, false), {Operation::kBroadcast, ncclInt8, 150000}).empty());
  EXPECT(!name(Selection(general, 8, limits, false), {Operation::kBroadcast, ncclInt8, 149000}).empty());
}

// ---- Options, interfaces, ids ----

void variables() {
  const auto with = [](std::map<std::string, std::string> values) {
    return read_options([&](const char* name) {
      const auto found = values.find(name);
      return found == values.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT(with({}).timeout_s == 600 && with({}).objection.empty());
  EXPECT(with({{"LLM_COMM_TIMEOUT_S", "2.5"}}).timeout_s == 2.5);
  EXPECT(with({{"LLM_COMM_WORKSPACE_BYTES", "128M"}}).workspace_bytes == 128 << 20);
  EXPECT(with({{"LLM_COMM_WORKSPACE_BYTES", "2 MiB"}}).objection.find("not allowed") != std::string::npos);
  EXPECT(with({{"LLM_COMM_WORKSPACE_BYTES", "1048576"}}).workspace_bytes == 1 << 20);
  for (const char* const wrong : {"0", "-1", "inf", "nan", "1e9", "3 s", "x"}) {
    EXPECT(!with({{"LLM_COMM_TIMEOUT_S", wrong}}).objection.empty());
  }
  EXPECT(!with({{"LLM_COMM_ENABLE", "off"}}).enable && with({{"LLM_COMM_ENABLE", ""}}).enable);
  // All that ranks could have differently, but for what they vote on (ENABLE) and compare by its content (TABLE).
  for (const auto& [name, other] : std::map<std::string, std::string>{{"LLM_COMM_TIMEOUT_S", "3"},
                                                                      {"LLM_COMM_WORKSPACE_BYTES", "128M"},
                                                                      {"LLM_COMM_PDL", "0"},
                                                                      {"LLM_COMM_DEBUG", "1"},
                                                                      {"LLM_COMM_SHARE_GPU", "1"}}) {
    EXPECT(with({{name, other}}).digest() != with({}).digest());
  }
}

void interfaces() {
  const std::vector<Interface> all{{"lo", {}}, {"docker0", {}}, {"eth0", {}}, {"eth1", {}}, {"ib0", {}}};
  const auto first = [&](const std::string& wish) {
    const auto chosen = choose(all, wish);
    return chosen.empty() ? std::string() : chosen.front().name;
  };
  EXPECT(first("") == "eth0");
  EXPECT(first("ib") == "ib0" && first("ib,eth1") == "eth1" && first("=eth") == "" && first("=eth1") == "eth1");
  EXPECT(first("^lo,docker,eth") == "ib0" && first("^=eth0") == "lo" && first("wlan") == "");
  EXPECT(choose({all[0], all[1]}, "").front().name == "lo" && choose({}, "").empty());
}

void ids() {
  HubAddress hub_address = *from_id([] {
    ncclUniqueId id{};
    const char bytes[] = "LLMCOMM\1\4\0\x12\x34\0\0\0\0\x7f\0\0\1";
    std::copy(bytes, bytes + sizeof(bytes), id.internal);
    return id;
  }());
  EXPECT(describe(hub_address.address) == "127.0.0.1:4660");
  hub_address.secret[31] = 7;
  EXPECT(from_id(to_id(hub_address))->secret == hub_address.secret);
  EXPECT(!from_id(ncclUniqueId{}));
}

}  // namespace

int main() {
  agreements();
  selections();
  variables();
  interfaces();
  ids();
  return failures == 0 ? 0 : 1;
}
