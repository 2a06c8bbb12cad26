// Replays calls, and mutations of them.
#include "comm/tests/call_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::comm {
namespace {

TEST(CallFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("comm/tests/call_corpus"),
      /*mutations=*/3000);
}

}  // namespace
}  // namespace fsdp::comm
