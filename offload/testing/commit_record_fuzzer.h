// What a kept file store says about itself under libFuzzer, whose flags, such
// as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //offload/testing:commit_record_fuzz -- DIR
#ifndef OFFLOAD_TESTING_COMMIT_RECORD_FUZZER_H_
#define OFFLOAD_TESTING_COMMIT_RECORD_FUZZER_H_

#include <cstddef>
#include <cstdint>

// The first byte says how many of the others are the header's payload; the rest
// is the record's. Both get checksums that are right, or are read as they are
// where the first byte is 0. Stops the program where what is read cannot lie in
// the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // OFFLOAD_TESTING_COMMIT_RECORD_FUZZER_H_
