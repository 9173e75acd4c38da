"""All-gather in a kernel of one's own, over the channels of a communicator: by stores, and by copy engines.

    torchrun --standalone --nproc-per-node 2 examples/all_gather_channels.py

Runs on GPUs where cupy is installed, else on emulated ones, for which g++ compiles the same kernels. Ranks that share
a GPU need LLM_COMM_SHARE_GPU=1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import llm_comm
from llm_comm import emulated

BY_STORES = r"""
#include "llm_comm/channels.cuh"
using namespace llm_comm;

// Part r of this rank's tensor, `bytes` long, is what rank r gives: it puts it to the same place on every peer.
// A block has a share of the part, and a semaphore of each pair; a thread of it for each peer signals and waits.
extern "C" LLM_COMM_KERNEL(512) all_gather(const Channels* channels, uint64_t bytes) {
  const uint64_t lines = bytes / sizeof(Line), block = block_index();
  const uint64_t begin = lines * block / block_count() * sizeof(Line);
  const uint64_t end = lines * (block + 1) / block_count() * sizeof(Line);
  const uint64_t offset = channels->rank() * bytes + begin;
  const auto meet = [&] {
    block_sync();
    if (thread_index() < channels->peers()) {
      const MemoryChannel channel = channels->memory_channel(channels->peer(thread_index()), block);
      channel.signal();
      channel.wait();
    }
    block_sync();
  };
  meet();  // every rank has begun, so what it did before has ended: nobody reads the tensors any more
  for (uint32_t i = 0; i < channels->peers(); ++i) {
    const MemoryChannel channel = channels->memory_channel(channels->peer(i), block);
    channel.put(offset, channel.local + offset, end - begin, thread_index(), block_threads());
  }
  meet();  // a signal after the puts: the parts of the peers are there
}
"""

BY_COPY_ENGINES = r"""
#include "llm_comm/channels.cuh"
using namespace llm_comm;

// The same with a thread for each peer, which has the proxy of this rank do the work.
extern "C" LLM_COMM_KERNEL(32) all_gather(const Channels* channels, uint64_t bytes) {
  if (thread_index() >= channels->peers()) return;
  const HeapPortChannel channel = channels->port_channel(channels->peer(thread_index()));
  const uint64_t offset = channels->rank() * bytes;
  channel.signal();
  channel.wait();  // the peer has begun
  channel.put_with_signal(offset, channels->local() + offset, bytes);
  channel.wait();   // its part is there
  channel.flush();  // this rank's part has been sent, and may be written again
}
"""


#: Source, name and device.
Compile = Callable[[str, str, torch.device], Callable[..., None]]


def compile_kernel(code: str, name: str, device: torch.device) -> Callable[..., None]:
    """A kernel that is called as those of cupy are, and launched on the current stream of torch."""
    if device.type == "cpu":
        return emulated.RawKernel(code, name)
    import cupy

    cupy.cuda.Device(device.index).use()
    kernel = cupy.RawKernel(code, name, options=llm_comm.get_nvrtc_options())

    def launch(*arguments: Any) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(*arguments)

    return launch


def gather(comm: llm_comm.Communicator, part_bytes: int, calls: int, compile_kernel: Compile = compile_kernel) -> int:
    """Gathers parts of so many bytes, each kernel so many times. Returns how many results were right."""
    tensor = comm.empty((comm.world_size, part_bytes), torch.uint8)
    blocks = 4
    channels = comm.channels(tensor, semaphores=blocks, code=BY_STORES + BY_COPY_ENGINES)
    right = 0
    for code, grid, block in ((BY_STORES, blocks, 128), (BY_COPY_ENGINES, 1, 32)):
        kernel = compile_kernel(code, "all_gather", comm.device)
        for call in range(calls):
            parts = torch.stack([torch.full((part_bytes,), 16 * call + r) for r in range(comm.world_size)])
            tensor[comm.rank].copy_(parts[comm.rank])
            kernel((grid,), (block,), (channels.handle, part_bytes))
            right += int(torch.equal(tensor.cpu(), parts.to(torch.uint8)))
            comm.check()
    return right


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--bytes", type=int, default=1 << 16, help="of a rank's part: a multiple of 16")
    options.add_argument("--calls", type=int, default=5, help="of each kernel")
    options.add_argument("--emulated", action="store_true", help="also where there are GPUs")
    arguments = options.parse_args()
    on_gpu = torch.cuda.is_available() and llm_comm.cuda_compiled() and not arguments.emulated
    if on_gpu and importlib.util.find_spec("cupy") is None:
        print("cupy is not installed: on emulated GPUs")
        on_gpu = False
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # containers often cannot resolve their own name
    dist.init_process_group("gloo")
    with llm_comm.Communicator(dist.group.WORLD, device) as comm:
        right = gather(comm, arguments.bytes, arguments.calls)
        print(f"rank {comm.rank} of {comm.world_size} on {device}: {right} of {2 * arguments.calls} results are right")
        assert right == 2 * arguments.calls
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
