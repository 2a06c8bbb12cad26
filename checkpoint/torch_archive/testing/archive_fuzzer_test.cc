// Replays files of torch.save() and mutations of them.
#include "checkpoint/torch_archive/testing/archive_fuzzer.h"

#include <gtest/gtest.h>

#include "checkpoint/pickle/testing/replay.h"

namespace fsdp::checkpoint {
namespace {

TEST(ArchiveFuzzerTest, TheSamplesAndMutationsOfThem) {
  testing::Replay(LLVMFuzzerTestOneInput,
                  testing::ReadCorpus("checkpoint/torch_archive/testing/data"),
                  /*mutations=*/3000);
}

}  // namespace
}  // namespace fsdp::checkpoint
