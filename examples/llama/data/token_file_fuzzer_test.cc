// Replays files of tokens, and mutations of them.
#include "examples/llama/data/token_file_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace llama {
namespace {

TEST(TokenFileFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("examples/llama/data/token_file_corpus"),
      /*mutations=*/1000);
}

}  // namespace
}  // namespace llama
