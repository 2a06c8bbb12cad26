#include "checkpoint/safetensors/testing/header_fuzzer.h"

#include "checkpoint/safetensors/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(HeaderFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  ReplayFuzzer(LLVMFuzzerTestOneInput,
               {"checkpoint/safetensors/testing/header_corpus"});
}

}  // namespace
}  // namespace fsdp::checkpoint
