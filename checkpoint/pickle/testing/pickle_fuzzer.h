// The unpickler under libFuzzer, whose flags, such as -max_total_time=300, come
// before DIR:
//   ./bazelw run --config=fuzz //checkpoint/pickle/testing:pickle_fuzz -- DIR
#ifndef CHECKPOINT_PICKLE_TESTING_PICKLE_FUZZER_H_
#define CHECKPOINT_PICKLE_TESTING_PICKLE_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Reads `data` as a pickle; stops the program where what was read is not the
// bounded tree that it must be.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_PICKLE_TESTING_PICKLE_FUZZER_H_
