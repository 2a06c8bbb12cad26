// The parser of indices under libFuzzer, whose flags come before DIR, which
// keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/huggingface/testing:index_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#ifndef CHECKPOINT_HUGGINGFACE_TESTING_INDEX_FUZZER_H_
#define CHECKPOINT_HUGGINGFACE_TESTING_INDEX_FUZZER_H_

#include <cstddef>
#include <cstdint>

// The text of an index. In what is accepted no file leaves the folder.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_HUGGINGFACE_TESTING_INDEX_FUZZER_H_
