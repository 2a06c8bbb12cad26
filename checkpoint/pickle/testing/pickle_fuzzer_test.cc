// Replays pickles, honest and hostile ones, and mutations of them.
#include "checkpoint/pickle/testing/pickle_fuzzer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/testing/fuzz_replay.h"

namespace fsdp::checkpoint {
namespace {

TEST(PickleFuzzerTest, TheCorpusAndMutationsOfIt) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("checkpoint/pickle/testing/corpus"),
      /*mutations=*/2000);
}

TEST(PickleFuzzerTest, AnyTwoBytes) {
  std::vector<std::string> inputs;
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      inputs.push_back(
          {static_cast<char>(first), static_cast<char>(second), '.'});
    }
  }
  fsdp::testing::ReplayFuzzer(LLVMFuzzerTestOneInput, inputs, /*mutations=*/0);
}

}  // namespace
}  // namespace fsdp::checkpoint
