#include "checkpoint/huggingface/testing/index_fuzzer.h"

#include "base/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(IndexFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("checkpoint/huggingface/testing/index_corpus"),
      /*mutations=*/10000);
}

}  // namespace
}  // namespace fsdp::checkpoint
