// The schedule under libFuzzer, whose flags, such as -max_total_time=300, come
// before DIR:
//   ./bazelw run --config=fuzz //fsdp/schedule/testing:schedule_fuzz -- DIR
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_FUZZER_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Makes a model and its steps out of `data`, runs them and stops the program,
// saying why, when a rule of the schedule is broken.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_FUZZER_H_
