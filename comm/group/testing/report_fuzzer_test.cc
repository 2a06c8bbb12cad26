// Replays what ranks tell each other, and mutations of it.
#include "comm/group/testing/report_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::comm {
namespace {

TEST(ReportFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("comm/group/testing/corpus"),
      /*mutations=*/5000);
}

}  // namespace
}  // namespace fsdp::comm
