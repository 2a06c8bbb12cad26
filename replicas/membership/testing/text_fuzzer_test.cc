// Replays texts of all kinds, and mutations of them.
#include "replicas/membership/testing/text_fuzzer.h"

#include "base/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::replicas {
namespace {

TEST(TextFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("replicas/membership/testing/corpus"),
      /*mutations=*/5000);
}

}  // namespace
}  // namespace fsdp::replicas
