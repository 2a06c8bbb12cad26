// The parser of safetensors headers under libFuzzer, whose flags come before
// DIR, which keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/safetensors/testing:header_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#ifndef CHECKPOINT_SAFETENSORS_TESTING_HEADER_FUZZER_H_
#define CHECKPOINT_SAFETENSORS_TESTING_HEADER_FUZZER_H_

#include <cstddef>
#include <cstdint>

// 8 bytes, which say how much data the file has, and a JSON header. What is
// accepted has to be read again from what is written of it.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_SAFETENSORS_TESTING_HEADER_FUZZER_H_
