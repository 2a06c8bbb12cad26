#include "checkpoint/huggingface/testing/index_fuzzer.h"

#include "checkpoint/safetensors/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(IndexFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  ReplayFuzzer(LLVMFuzzerTestOneInput,
               {"checkpoint/huggingface/testing/index_corpus"});
}

}  // namespace
}  // namespace fsdp::checkpoint
