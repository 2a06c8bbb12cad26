// What peers say that they call, in shared memory and over Gloo:
//   ./bazelw run --config=fuzz //comm/tests:call_fuzz -- DIR
// Stops the program where another call is taken for one's own, or a text is
// longer than its place.
#ifndef COMM_TESTS_CALL_FUZZER_H_
#define COMM_TESTS_CALL_FUZZER_H_

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // COMM_TESTS_CALL_FUZZER_H_
