// The parser of manifests under libFuzzer, whose flags come before DIR, which
// keeps what it finds:
//   ./bazelw run --config=fuzz //checkpoint/commit/testing:manifest_fuzz --
//     -max_total_time=600 -rss_limit_mb=512 DIR
#ifndef CHECKPOINT_COMMIT_TESTING_MANIFEST_FUZZER_H_
#define CHECKPOINT_COMMIT_TESTING_MANIFEST_FUZZER_H_

#include <cstddef>
#include <cstdint>

// The text of a manifest, as it is, and once more with the checksum that it
// should have, which a fuzzer cannot guess. What is accepted names files that
// lie in the checkpoint, with a checksum for each block, and says the same when
// it is written again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CHECKPOINT_COMMIT_TESTING_MANIFEST_FUZZER_H_
