// Replays records of kept file stores, and mutations of them.
#include "offload/testing/commit_record_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::offload {
namespace {

TEST(CommitRecordFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("offload/testing/commit_record_corpus"),
      /*mutations=*/5000);
}

}  // namespace
}  // namespace fsdp::offload
