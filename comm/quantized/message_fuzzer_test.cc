// Replays messages, and mutations of them.
#include "comm/quantized/message_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::comm {
namespace {

TEST(MessageFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("comm/quantized/message_corpus"),
      /*mutations=*/2000);
}

}  // namespace
}  // namespace fsdp::comm
