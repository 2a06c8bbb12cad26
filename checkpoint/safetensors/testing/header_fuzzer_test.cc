#include "checkpoint/safetensors/testing/header_fuzzer.h"

#include "base/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(HeaderFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("checkpoint/safetensors/testing/header_corpus"),
      /*mutations=*/10000);
}

}  // namespace
}  // namespace fsdp::checkpoint
