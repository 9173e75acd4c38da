#include "nccl/workspaces.h"

#include <unistd.h>

#include "nccl/failure.h"
#include "nccl/log.h"

namespace llm_comm::nccl {

namespace {

void map_by_descriptor(host::Core& core, Bootstrap& bootstrap, const DescriptorExchange::Result& peers) {
  bootstrap.attempt("mapping of the workspaces of the peers", [&] {
    for (int peer = 0; peer < bootstrap.world(); ++peer) {
      if (peer != bootstrap.rank()) core.map_peer(peer, {peers.descriptors[static_cast<size_t>(peer)].fd(), ""});
    }
  });
}

// Where memory cannot be shared by descriptors. Not between threads of one process.
void map_by_ipc(host::Core& core, Bootstrap& bootstrap) {
  std::string handle;
  bootstrap.attempt("allocation of the workspace", [&] { handle = core.create_workspace(true).bytes; });
  const std::vector<std::string> handles = bootstrap.exchange(handle);
  bootstrap.attempt("mapping of the workspaces of the peers", [&] {
    for (int peer = 0; peer < bootstrap.world(); ++peer) {
      if (peer != bootstrap.rank()) core.map_peer(peer, {-1, handles[static_cast<size_t>(peer)]});
    }
  });
}

}  // namespace

std::vector<pid_t> map_workspaces(host::Core& core, Bootstrap& bootstrap, DescriptorExchange& exchange,
                                  const std::vector<std::string>& names, double limit_s) {
  DescriptorExchange::Result peers;
  try {
    Descriptor own;
    bootstrap.attempt("allocation of the workspace", [&] { own = Descriptor(core.create_workspace(false).fd); });
    bootstrap.attempt("exchange of descriptors",
                      [&] { peers = exchange.run(bootstrap.rank(), names, bootstrap.secret(), own.fd(), limit_s); });
    map_by_descriptor(core, bootstrap, peers);
  } catch (const Failure& error) {
    if (error.result() != ncclSystemError) throw;  // a rank is lost
    inform(std::string(error.what()) + ": trying cudaIpc");
    map_by_ipc(core, bootstrap);
  }
  bootstrap.attempt("peer-to-peer write", [&] { core.send_marks(); });
  bootstrap.attempt("peer-to-peer test", [&] {
    if (!core.peers_unseen().empty()) throw Failure(ncclSystemError, "stores of a peer did not arrive");
  });
  peers.processes.resize(names.size());
  return peers.processes;
}

}  // namespace llm_comm::nccl
