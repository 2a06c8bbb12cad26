// The reader of torch.save() files under libFuzzer, whose flags, such as
// -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz
//       //checkpoint/torch_archive/testing:archive_fuzz -- DIR
#ifndef CHECKPOINT_TORCH_ARCHIVE_TESTING_ARCHIVE_FUZZER_H_
#define CHECKPOINT_TORCH_ARCHIVE_TESTING_ARCHIVE_FUZZER_H_

#include <cstddef>
#include <cstdint>

// Reads `data` as such a file; stops the program where a tensor that it has
// leaves the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_TORCH_ARCHIVE_TESTING_ARCHIVE_FUZZER_H_
