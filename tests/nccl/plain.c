// A program in C as there are many: two communicators of one thread, an all-reduce and a broadcast of both in a group. Exit status: 0
// the sums are right, 1 not.
#include <stdio.h>

#include "nccl/nccl_api.h"

#define CHECK(call)                                                                                \
  do {                                                                                             \
    const ncclResult_t result = (call);                                                            \
    if (result != ncclSuccess) {                                                                   \
      fprintf(stderr, "%s: %s (%s)\n", #call, ncclGetErrorString(result), ncclGetLastError(NULL)); \
      return 1;                                                                                    \
    }                                                                                              \
  } while (0)

int main(void) {
  enum { kRanks = 2, kCount = 1000 };
  static float numbers[kRanks][kCount];
  static float sums[kRanks][kCount];
  ncclComm_t comms[kRanks];
  CHECK(ncclCommInitAll(comms, kRanks, NULL));
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < kCount; ++i) numbers[rank][i] = (float)(rank + i);
  }
  CHECK(ncclGroupStart());
  for (int rank = 0; rank < kRanks; ++rank) {
    CHECK(ncclAllReduce(numbers[rank], sums[rank], kCount, ncclFloat32, ncclSum, comms[rank], NULL));
    CHECK(ncclBcast(numbers[rank], kCount, ncclFloat32, 1, comms[rank], NULL));
  }
  CHECK(ncclGroupEnd());
  int wrong = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < kCount; ++i) wrong += sums[rank][i] != (float)(2 * i + 1) || numbers[rank][i] != (float)(1 + i);
    CHECK(ncclCommDestroy(comms[rank]));
  }
  if (wrong != 0) fprintf(stderr, "%d numbers are wrong\n", wrong);
  return wrong != 0;
}
