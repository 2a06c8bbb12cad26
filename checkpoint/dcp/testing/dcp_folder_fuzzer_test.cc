// Replays the folders of samples, with one of their files in the place of all,
// and mutations of them.
#include "checkpoint/dcp/testing/dcp_folder_fuzzer.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/fuzz_replay.h"
#include "checkpoint/files/testing/real_files.h"

namespace fsdp::checkpoint {
namespace {

TEST(DcpFolderFuzzerTest, TheSamplesAndMutationsOfThem) {
  std::vector<std::string> inputs;
  const std::pair<const char*, const char*> kSamples[] = {
      {"plain", "__0_0.distcp"},
      {"transposed", "__0_0.distcp"},
      {"torchtitan_0_3", "__1_0.distcp"},
      {"megatron_0_15", "__0_0.distcp"},
  };
  for (const auto& [sample, file] : kSamples) {
    const std::string folder =
        absl::StrCat("checkpoint/dcp/testing/data/", sample);
    const std::string metadata =
        testing::ReadWholeFile(absl::StrCat(folder, "/metadata"));
    ASSERT_LT(metadata.size(), 65536u);
    inputs.push_back(std::string{static_cast<char>(metadata.size() % 256),
                                 static_cast<char>(metadata.size() / 256)});
    absl::StrAppend(&inputs.back(), metadata,
                    testing::ReadWholeFile(absl::StrCat(folder, "/", file)));
  }
  fsdp::testing::ReplayFuzzer(LLVMFuzzerTestOneInput, inputs,
                              /*mutations=*/5000);
}

}  // namespace
}  // namespace fsdp::checkpoint
