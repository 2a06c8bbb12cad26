// Runs the schedule under libFuzzer. Its flags, such as -max_total_time=300,
// come before DIR:
//   ./bazelw run --config=fuzz //fsdp/schedule/testing:schedule_fuzz -- DIR
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "fsdp/schedule/testing/choices.h"
#include "fsdp/schedule/testing/schedule_run.h"

// Makes a model and its steps from `data` and runs them. If a rule of the
// schedule is broken, it says so and stops the program.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A step takes about this many bytes at least.
  constexpr size_t kBytesPerStep = 32;
  const int steps =
      static_cast<int>(std::min<size_t>(size / kBytesPerStep, 64));
  fsdp::testing::ByteChoices choices(data, size);
  const fsdp::testing::ScheduleRun run =
      fsdp::testing::RunSchedule(&choices, 1 + steps);
  if (!run.error.empty()) {
    std::fprintf(stderr, "%s\n", run.error.c_str());
    std::abort();
  }
  return 0;
}
