// The one door to the target: CUDA GPUs or the emulator. Kernels and primitives use only what is declared here, so the
// same source runs on both. A new target (HIP, say) is a new platform_*.h with these definitions.
//
// Functions          LLM_COMM_DEVICE: inline in all kernels; LLM_COMM_DEVICE_CALL: called, for what hardly ever runs, so that
//                    its instructions do not lie among those that do
// Thread geometry    thread_index() block_index() block_threads() block_count()   (one-dimensional launches)
// Block              block_sync(); shared_memory<T>(): dynamic shared memory of this block, 16-byte aligned
// Warp               shuffle_xor(x, mask): x of the lane whose number differs by mask; all lanes of a warp (32 threads in
//                    a row) make the call, in a block whose size is a multiple of 32
//                    any_lane(b): whether b holds in any of them
// Cluster            blocks of a launch that run at once and reach each other's shared memory: `blocks` neighbours, of
//                    which the first has an index divisible by `blocks`; 1 on devices without clusters
//                    cluster_index(): block_index() / blocks; cluster_block_rank(): block_index() % blocks
//                    cluster_arrive_relaxed(), cluster_wait(): the two halves of a barrier of all threads of the cluster;
//                    of what a thread did before, only delivery_init() is known to others after it
//                    of_first_in_cluster(p): the word at p in the shared memory of the cluster's first block; all threads
//                    of the cluster make the call, which is a barrier of them
// Delivery           stores of floats into the shared memory of blocks of a cluster of k, counted there: a uint64_t of
//                    shared memory, delivery_init(d, n, k) by one thread, before the cluster's barrier;
//                    delivery_expect(d, n, k) by one thread in each phase: n values end it, the same number in all;
//                    deliver(p, b, x, d, k): *p = x in block b, counted in its d; deliver_four(p, b, values, d): the same
//                    for p[0] to p[3], 16-byte aligned, as one store, where k > 1; delivery_wait(d, parity): until the
//                    phase of that parity (the first has 0) is over and what was delivered in it can be read
// Grid order         grid_dependency_trigger(): the next grid of the stream may be scheduled
//                    grid_dependency_wait(): all earlier grids of the stream are complete and visible
//                    grid_dependency_wait_after(x): the same, once x (any value but 0) has been computed
// Plain memory       load_line / store_line: one 16-byte access; load_plain / store_plain: one of the size of T;
//                    load_words(p, words): 1, 2 or 4 words by one access, which is not waited for before they are used
// System scope       load_line_relaxed / store_line_relaxed: 16 bytes, of which only each 4-byte word is a unit;
//                    load_line_relaxed_if(is_wanted, p, line): the same into `line`, where it is wanted, without a branch;
//                    load_packet_relaxed / store_packet_relaxed: the same, but each 8-byte half is a unit;
//                    {load,store}_relaxed, load_acquire, store_release on uint32_t, uint64_t; fence_system();
//                    store_packets_release(p, packets): neighbouring packets, each half of which is a release
// Device scope       read-modify-writes. All are relaxed: they order no other access. Where one is to tell of others,
//                    fence_system() lies on both sides.
//                    add_relaxed(uint64_t*, n): no value comes back, so nobody waits for it; compare_and_swap;
//                    fetch_add(uint64_t*, n): what was there;
//                    count_up(uint32_t*, last): what was there; adds 1, or starts again at 0 from `last` on
//                    A load_line() beside them finds each 8-byte half as it was before or after one of them. PTX promises
//                    that of relaxed loads alone; GPUs make a load of 16 aligned bytes one access to the L2
// Waiting            clock_ns(): monotonic; spin_hint(): called after a poll that failed;
//                    kPollsPerCheck: failed polls after which a wait looks at the clock
// Multicast          of NVLink, where a MulticastPlace leads to several memories: multicast_load_reduce_{bf16,fp16,fp32}: the sum
//                    of a line, in any order, in fp32 at least, rounded once; multicast_store_line; multicast_add_relaxed and
//                    multicast_add_release on uint32_t, uint64_t. System scope; of a line only each 4-byte word is a unit.
//                    fence_aliases(): between accesses to one memory by two addresses (switch_channel.cuh)
// Conversions        bf16 and fp16 bits <-> float, round to nearest even, NaN always becomes 0x7FFF;
//                    convert_to_e4m3(x, bits): as float_to_e4m3 of fp8.cuh; false where the target cannot
// Addresses          opaque(p): p, which the compiler takes as it is, not as the sum that it is
// Arithmetic         multiply_add(a, b, c): a * b + c, rounded once; reciprocal_sqrt; larger(a, b): NaN if both are;
//                    exponential(x): e^x, off by up to two units in the last place
#pragma once

#if defined(LLM_COMM_EMULATOR)
#include "llm_comm/platform_emulator.h"
#include "llm_comm/platform_emulator_multicast.h"
#else
#include "llm_comm/platform_cuda.cuh"
#include "llm_comm/platform_cuda_multicast.cuh"
#endif
