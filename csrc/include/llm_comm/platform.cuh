// Platform contract: the functions through which kernels and primitives access the target: CUDA GPUs, the emulator, or
// GPUs of AMD, which compile only (docs/develop/amd.md). Kernels use nothing else of the target, so the same source runs
// on all.
//
// Functions       LLM_COMM_DEVICE: always inlined. LLM_COMM_DEVICE_CALL: rare code. CUDA calls it, so that its
//                 instructions stay out of the hot path.
// Thread geometry thread_index() block_index() block_threads() block_count(). Launches are one-dimensional.
// Block           block_sync(). shared_memory<T>(): dynamic shared memory of the block, 16-byte aligned.
//                 set_bits(p, bits): sets bits of a word in shared memory, atomically within the block.
// Warp            shuffle_xor(x, mask): x of the lane whose index differs by mask. any_lane(b): true if b holds in any
//                 lane. All kWarpThreads lanes make the call; the block size must be a multiple of that.
// Cluster         `blocks` neighbouring blocks that run at once and access each other's shared memory. The index of the
//                 first is divisible by `blocks`. Devices without clusters have clusters of 1 block.
//                 cluster_index(): block_index() / blocks. cluster_block_rank(): block_index() % blocks.
//                 cluster_arrive_relaxed(), cluster_wait(): the two halves of a barrier of all threads of the cluster.
//                 The barrier publishes only delivery_init(), no other stores. With cluster_arrive() as the first half
//                 it publishes the thread's stores to shared memory, and the thread's loads have been done.
//                 load_of_block(p, b): the float at p in the shared memory of block b of the cluster, which must not
//                 have ended.
//                 of_first_in_cluster(p): the word at p in the shared memory of the cluster's first block. All threads
//                 of the cluster make the call, which is a barrier.
// Delivery        mbarrier transactions: stores of floats into the shared memory of another block of the cluster,
//                 counted by an mbarrier there, a uint64_t in shared memory. k: blocks of the cluster.
//                 delivery_init(d, n, k): one thread, before the cluster barrier. n: values of a phase, the same for
//                 all.
//                 delivery_expect(d, n, k): one thread in each phase.
//                 deliver(p, b, x, d, k): stores x to p in block b and counts it in d of that block.
//                 deliver_four(p, b, values, d): p[0] to p[3], 16-byte aligned, as one store; only where k > 1.
//                 delivery_wait(d, parity): waits until the phase of that parity is complete and its values are
//                 visible. The first phase has parity 0.
// Grid order      Programmatic dependent launch. grid_dependency_trigger(): the next grid of the stream may be
//                 scheduled.
//                 grid_dependency_wait(): all earlier grids of the stream are complete and visible.
//                 grid_dependency_wait_after(x): as before, after x (any value but 0) has been computed.
// Plain memory    load_line / store_line: one 16-byte access. load_plain / store_plain: one access of the size of T.
//                 load_words(p, words): 1, 2 or 4 words by one access. The thread waits for them only at their first
//                 use.
// System scope    load_line_relaxed / store_line_relaxed: 16 bytes, atomic for each 4-byte word only.
//                 load_line_relaxed_if(is_wanted, p, line): load_line_relaxed under a predicate, without a branch.
//                 load_packet_relaxed / store_packet_relaxed: 16 bytes, atomic for each 8-byte half.
//                 {load,store}_relaxed, load_acquire, store_release on uint32_t, uint64_t. fence_system().
//                 poll_acquire(p, has_come): has_come(the word at p). If so, the load was an acquire.
//                 store_packets_release(p, packets): neighbouring packets; the store of each half is a release.
// Device scope    Read-modify-writes. All are relaxed and order no other access. An algorithm that needs order puts a
//                 fence_system() on both sides.
//                 add_relaxed(uint64_t*, n): returns nothing, so no thread waits for it. compare_and_swap.
//                 fetch_add(uint64_t*, n): returns the old value.
//                 count_up(uint32_t*, last): returns the old value, adds 1, and wraps to 0 after `last`.
//                 A concurrent load_line() sees each 8-byte half either before or after such an update. PTX promises
//                 that for relaxed loads only; GPUs serve an aligned 16-byte load as one access to the L2.
// Waiting         clock_ns(): monotonic. spin_hint(): call after a failed poll.
//                 kPollsPerCheck: failed polls after which a wait reads the clock.
// Multicast       NVLink multicast to the memories behind a MulticastAddress. System scope; only each 4-byte word is
//                 atomic. multicast_load_reduce_{bf16,fp16,fp32}: sum of a line over all memories, in any order,
//                 accumulated in fp32 at least, rounded once. multicast_store_line.
//                 multicast_add_relaxed, multicast_add_release on uint32_t, uint64_t.
//                 fence_aliases(): orders accesses to one memory through two addresses (switch_channel.cuh).
// Conversions     bf16 and fp16 bits <-> float, round to nearest even; every NaN becomes 0x7FFF. floats_to_bf16(low, high)
//                 and floats_to_fp16(low, high) round two values into the halves of a word.
//                 convert_to_e4m3(low, high, bits), convert_from_e4m3(bits, low, high): two values as fp8.cuh defines
//                 them, in hardware; false where the target has no such instruction.
// Words           word_at(line, i), or_into_word(line, i, bits): for an i that is known at run time only.
// Addresses       opaque(p): returns p and hides from the compiler how p was computed.
// Arithmetic      count_bits(x): how many bits are set. multiply_add(a, b, c): a * b + c, rounded once. reciprocal_sqrt.
//                 larger(a, b): NaN only if both are.
//                 exponential(x): e^x, with an error of up to two units in the last place.
#pragma once

#if defined(LLM_COMM_EMULATOR)
#include "llm_comm/platform_emulator.h"
#include "llm_comm/platform_emulator_multicast.h"
#elif defined(__HIP__)
#include "llm_comm/platform_hip.cuh"
#else
#include "llm_comm/platform_cuda.cuh"
#include "llm_comm/platform_cuda_multicast.cuh"
#endif
