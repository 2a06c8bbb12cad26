// Statuses and reports of failures as peers may send them, under libFuzzer,
// whose flags, such as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //comm/group/testing:report_fuzz -- DIR
#ifndef COMM_GROUP_TESTING_REPORT_FUZZER_H_
#define COMM_GROUP_TESTING_REPORT_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Stops the program where what is read does not read the same again, or does
// not explain a failure.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // COMM_GROUP_TESTING_REPORT_FUZZER_H_
