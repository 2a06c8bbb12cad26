// Replays introductions, and mutations of them.
#include "comm/tests/introduction_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::comm {
namespace {

TEST(IntroductionFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("comm/tests/introduction_corpus"),
      /*mutations=*/300);
}

}  // namespace
}  // namespace fsdp::comm
