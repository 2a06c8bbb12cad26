// Replays `.metadata` of samples and mutations of them.
#include "checkpoint/dcp/testing/dcp_fuzzer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/fuzz_replay.h"
#include "checkpoint/files/testing/real_files.h"

namespace fsdp::checkpoint {
namespace {

TEST(DcpFuzzerTest, TheSamplesAndMutationsOfThem) {
  std::vector<std::string> inputs;
  for (const char* const sample :
       {"plain", "sharded", "transposed", "torchtitan_0_2", "torchtitan_0_3",
        "megatron_0_15", "megatron_0_16"}) {
    inputs.push_back(testing::ReadWholeFile(
        absl::StrCat("checkpoint/dcp/testing/data/", sample, "/metadata")));
  }
  fsdp::testing::ReplayFuzzer(LLVMFuzzerTestOneInput, inputs,
                              /*mutations=*/10000);
}

}  // namespace
}  // namespace fsdp::checkpoint
