// Messages of quantised collectives as peers may send them:
//   ./bazelw run --config=fuzz //comm/quantized:message_fuzz -- DIR
// Stops the program where the numbers are not those that the message has by
// arithmetic, or something beside them is written.
#ifndef COMM_QUANTIZED_MESSAGE_FUZZER_H_
#define COMM_QUANTIZED_MESSAGE_FUZZER_H_

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // COMM_QUANTIZED_MESSAGE_FUZZER_H_
