// What a rank of a group in shared memory tells its peer when they meet, and
// what it then has in its memory:
//   ./bazelw run --config=fuzz //comm/tests:introduction_fuzz -- DIR
// Stops the program where anything but an error comes of it, or a group that
// can be asked for a collective.
#ifndef COMM_TESTS_INTRODUCTION_FUZZER_H_
#define COMM_TESTS_INTRODUCTION_FUZZER_H_

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // COMM_TESTS_INTRODUCTION_FUZZER_H_
