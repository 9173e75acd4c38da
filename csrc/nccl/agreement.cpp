#include "nccl/agreement.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "nccl/failure.h"
#include "nccl/wire.h"

namespace llm_comm::nccl {

namespace {

// Texts are cut so that an entry fits a message of the hub.
std::string_view cut(const std::string& text) { return std::string_view(text).substr(0, 400); }

std::string of_rank(size_t rank, const std::string& text) { return "rank " + std::to_string(rank) + ": " + text; }

}  // namespace

std::string Entry::bytes() const {
  Writer writer;
  for (const std::string* const text : {&host, &name, &device, &uuid, &options, &table, &objection}) {
    writer.text(cut(*text));
  }
  writer.number(sm_count).number(max_cluster).number(compute_capability);
  return writer.number(is_enabled).number(share_gpu).number(has_real_library).bytes();
}

Entry Entry::from(const std::string& bytes) {
  Reader reader(bytes);
  Entry entry;
  for (std::string* const text :
       {&entry.host, &entry.name, &entry.device, &entry.uuid, &entry.options, &entry.table, &entry.objection}) {
    *text = reader.text();
  }
  for (uint32_t* const value : {&entry.sm_count, &entry.max_cluster, &entry.compute_capability}) {
    *value = static_cast<uint32_t>(reader.number());
  }
  for (bool* const value : {&entry.is_enabled, &entry.share_gpu, &entry.has_real_library})
    *value = reader.number() != 0;
  reader.end();
  return entry;
}

Agreement agree(const std::vector<Entry>& entries, bool is_offered_real) {
  const Entry& first = entries.front();
  Agreement agreement;
  agreement.uses_real_library = is_offered_real;
  agreement.limits = {0, first.sm_count, first.max_cluster, first.compute_capability, 0};
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    const Entry& entry = entries[rank];
    if (!entry.objection.empty()) throw Failure(ncclInvalidArgument, of_rank(rank, entry.objection));
    if (entry.has_real_library != first.has_real_library) {
      throw Failure(ncclInvalidUsage, "some ranks have found the NCCL library and some not (rank 0 has" +
                                          std::string(first.has_real_library ? ", rank " : " not, rank ") +
                                          std::to_string(rank) + (entry.has_real_library ? " has" : " has not") +
                                          "): LLM_COMM_NCCL_LIBRARY must name it on all");
    }
    agreement.uses_real_library &= entry.has_real_library;
    agreement.limits.sm_count = std::min(agreement.limits.sm_count, entry.sm_count);
    agreement.limits.max_cluster = std::min(agreement.limits.max_cluster, entry.max_cluster);
  }
  std::string& why = agreement.why_not_served;
  if (entries.size() > static_cast<size_t>(kMaxWorldSize)) {
    why = std::to_string(entries.size()) + " ranks; llm_comm serves up to " + std::to_string(kMaxWorldSize);
  } else if (entries.size() == 1) {
    why = "one rank: nothing to exchange";
  }
  for (size_t rank = 0; rank < entries.size() && why.empty(); ++rank) {
    const Entry& entry = entries[rank];
    if (!entry.is_enabled) why = of_rank(rank, "LLM_COMM_ENABLE is 0");
    if (entry.host != first.host) why = of_rank(rank, "it is on another host, or in another container, than rank 0");
    if (entry.device != first.device) why = of_rank(rank, "its device is " + entry.device + ", not " + first.device);
    if (entry.options != first.options)
      why = of_rank(rank, "its options are " + entry.options + ", not " + first.options);
    if (entry.table != first.table) why = of_rank(rank, "its tuning table is " + entry.table + ", not " + first.table);
    for (size_t other = 0; other < rank; ++other) {
      if (!entry.uuid.empty() && entry.uuid == entries[other].uuid && !entry.share_gpu) {
        why = of_rank(rank, "it has the GPU of rank " + std::to_string(other));
      }
    }
  }
  if (!why.empty() && entries.size() > 1 && !agreement.uses_real_library) {
    throw Failure(ncclInvalidUsage,
                  "llm_comm does not serve this communicator (" + why + "), and there is no NCCL library to do it");
  }
  return agreement;
}

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  struct stat network{};
  stat("/proc/self/ns/net", &network);
  // A container has the boot id of its host. Its host name need not be that of its neighbours, so it is not used.
  return boot.empty() ? std::string(host) : boot + " " + std::to_string(network.st_ino);
}

}  // namespace llm_comm::nccl
