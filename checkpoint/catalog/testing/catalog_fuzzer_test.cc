#include "checkpoint/catalog/testing/catalog_fuzzer.h"

#include "checkpoint/safetensors/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(CatalogFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  ReplayFuzzer(LLVMFuzzerTestOneInput,
               {"checkpoint/catalog/testing/catalog_corpus"});
}

}  // namespace
}  // namespace fsdp::checkpoint
