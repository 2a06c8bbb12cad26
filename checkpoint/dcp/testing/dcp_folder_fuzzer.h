// The reader of models and optimizers in DCP folders under libFuzzer, whose
// flags, such as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //checkpoint/dcp/testing:dcp_folder_fuzz -- DIR
#ifndef CHECKPOINT_DCP_TESTING_DCP_FOLDER_FUZZER_H_
#define CHECKPOINT_DCP_TESTING_DCP_FOLDER_FUZZER_H_

#include <cstddef>
#include <cstdint>

// `data`: how long `.metadata` is, in two bytes, the lower one first; it; and
// what each file that it names holds. Stops the program where a tensor that was
// found lies outside of its file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_DCP_TESTING_DCP_FOLDER_FUZZER_H_
