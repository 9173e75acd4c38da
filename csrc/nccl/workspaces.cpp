#include "nccl/workspaces.h"

#include "nccl/failure.h"
#include "nccl/log.h"

namespace llm_comm::nccl {

namespace {

// Attempts a step. Returns the reason of a failure on any rank, the same on all ranks; empty on success. Throws Failure
// if a rank is lost.
template <class Step>
std::string objection_to(Bootstrap& bootstrap, const char* what, Step step) {
  try {
    bootstrap.attempt(what, step);
  } catch (const Failure& failure) {
    if (failure.result() != ncclSystemError) throw;
    return failure.what();
  }
  return "";
}

void map_by_descriptor(host::Core& core, const Bootstrap& bootstrap, const std::vector<Descriptor>& workspaces) {
  for (int peer = 0; peer < bootstrap.world(); ++peer) {
    if (peer != bootstrap.rank()) core.map_peer(peer, {workspaces[static_cast<size_t>(peer)].fd(), ""});
  }
}

// Fallback if memory cannot be shared by descriptors. Does not work between threads of one process.
void map_by_ipc(host::Core& core, Bootstrap& bootstrap) {
  std::string handle;
  bootstrap.attempt("allocation of the workspace", [&] { handle = core.create_workspace(host::Sharing::kIpc).bytes; });
  const std::vector<std::string> handles = bootstrap.exchange(handle);
  bootstrap.attempt("mapping of the workspaces of the peers", [&] {
    for (int peer = 0; peer < bootstrap.world(); ++peer) {
      if (peer != bootstrap.rank()) core.map_peer(peer, {-1, handles[static_cast<size_t>(peer)]});
    }
  });
}

}  // namespace

std::vector<Descriptor> map_workspaces(host::Core& core, Bootstrap& bootstrap, DescriptorExchange& exchange,
                                       const std::vector<std::string>& names, double limit_s) {
  Descriptor own;
  std::string objection = objection_to(bootstrap, "allocation of the workspace",
                                       [&] { own = Descriptor(core.create_workspace(host::Sharing::kDescriptor).fd); });
  // Also needed with cudaIpc: the ranks watch each other's processes through the pidfds.
  DescriptorExchange::Result peers;
  peers.processes.resize(names.size());
  const int sent = objection.empty() ? own.fd() : -1;
  // Half of the time limit: a rank that failed at once waits in the vote already, for the whole limit.
  const std::string not_exchanged = objection_to(bootstrap, "exchange of descriptors", [&] {
    peers = exchange.run(bootstrap.rank(), names, bootstrap.secret(), sent, bootstrap.socket(), limit_s / 2);
  });
  if (objection.empty()) objection = not_exchanged;
  if (objection.empty()) {
    objection = objection_to(bootstrap, "mapping of the workspaces of the peers",
                             [&] { map_by_descriptor(core, bootstrap, peers.workspaces); });
  }
  if (!objection.empty()) {
    inform(objection + ": trying cudaIpc");
    try {
      map_by_ipc(core, bootstrap);
    } catch (const Failure& failure) {
      throw Failure(failure.result(), objection + "; by cudaIpc: " + failure.what());
    }
  }
  bootstrap.attempt("peer-to-peer write", [&] { core.send_marks(); });
  bootstrap.attempt("peer-to-peer test", [&] {
    if (!core.peers_unseen().empty()) throw Failure(ncclSystemError, "stores of a peer did not arrive");
  });
  return std::move(peers.processes);
}

}  // namespace llm_comm::nccl
