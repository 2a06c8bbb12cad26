// Runs the schedule under libFuzzer. Its flags, such as -max_total_time=300,
// come before DIR:
//   ./bazelw run --config=fuzz //fsdp/schedule/testing:schedule_fuzz -- DIR
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_FUZZER_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Makes a model and its steps from `data` and runs them. If a rule of the
// schedule is broken, it says so and stops the program.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_FUZZER_H_
