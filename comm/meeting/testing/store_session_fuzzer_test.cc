// Replays what ranks and strangers may send, and mutations of it.
#include "comm/meeting/testing/store_session_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::comm {
namespace {

TEST(StoreSessionFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("comm/meeting/testing/corpus"),
      /*mutations=*/5000);
}

}  // namespace
}  // namespace fsdp::comm
