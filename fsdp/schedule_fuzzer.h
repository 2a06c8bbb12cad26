// The schedule under libFuzzer:
//   ./bazelw run --config=fuzz //fsdp:schedule_fuzz -- -max_total_time=300 DIR
#ifndef FSDP_SCHEDULE_FUZZER_H_
#define FSDP_SCHEDULE_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Makes a model and its steps out of `data`, runs them and stops the program,
// saying why, when a rule of the schedule is broken.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // FSDP_SCHEDULE_FUZZER_H_
