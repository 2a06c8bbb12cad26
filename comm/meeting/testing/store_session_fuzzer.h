// A store's end of a connection under libFuzzer, whose flags, such as
// -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //comm/meeting/testing:store_session_fuzz -- DIR
#ifndef COMM_MEETING_TESTING_STORE_SESSION_FUZZER_H_
#define COMM_MEETING_TESTING_STORE_SESSION_FUZZER_H_

#include <cstddef>
#include <cstdint>

// The first byte says how the rest comes: odd, from a rank, else from a
// stranger; and in pieces of how many bytes. Stops the program where a stranger
// gets in, or more is kept than there should be.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // COMM_MEETING_TESTING_STORE_SESSION_FUZZER_H_
