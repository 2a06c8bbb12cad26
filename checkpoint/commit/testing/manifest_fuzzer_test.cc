#include "checkpoint/commit/testing/manifest_fuzzer.h"

#include "base/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(ManifestFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("checkpoint/commit/testing/manifest_corpus"),
      /*mutations=*/10000);
}

}  // namespace
}  // namespace fsdp::checkpoint
