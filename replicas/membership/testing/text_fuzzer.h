// What replicas and their keeper may send, and a file of history, under
// libFuzzer, whose flags, such as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //replicas/membership/testing:text_fuzz -- DIR
#ifndef REPLICAS_MEMBERSHIP_TESTING_TEXT_FUZZER_H_
#define REPLICAS_MEMBERSHIP_TESTING_TEXT_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Reads the bytes as each of them. Stops the program where what was read is
// not written the same, or the rules make of it what cannot be read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // REPLICAS_MEMBERSHIP_TESTING_TEXT_FUZZER_H_
