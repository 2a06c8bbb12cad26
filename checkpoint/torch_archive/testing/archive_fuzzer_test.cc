// Replays files of torch.save() and mutations of them.
#include "checkpoint/torch_archive/testing/archive_fuzzer.h"

#include <gtest/gtest.h>

#include "base/testing/fuzz_replay.h"

namespace fsdp::checkpoint {
namespace {

TEST(ArchiveFuzzerTest, TheSamplesAndMutationsOfThem) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("checkpoint/torch_archive/testing/data"),
      /*mutations=*/3000);
}

}  // namespace
}  // namespace fsdp::checkpoint
