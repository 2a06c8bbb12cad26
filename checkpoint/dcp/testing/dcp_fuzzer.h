// The reader of `.metadata` under libFuzzer, whose flags, such as
// -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //checkpoint/dcp/testing:dcp_fuzz -- DIR
#ifndef CHECKPOINT_DCP_TESTING_DCP_FUZZER_H_
#define CHECKPOINT_DCP_TESTING_DCP_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Reads `data` as such a file; stops the program where a chunk is outside of
// its tensor or a file outside of the checkpoint.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_DCP_TESTING_DCP_FUZZER_H_
