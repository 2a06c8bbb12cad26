#include "checkpoint/catalog/testing/catalog_fuzzer.h"

#include "base/testing/fuzz_replay.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(CatalogFuzzerTest, MutationsOfTheCorpusAreReadOrRefused) {
  fsdp::testing::ReplayFuzzer(
      LLVMFuzzerTestOneInput,
      fsdp::testing::ReadCorpus("checkpoint/catalog/testing/catalog_corpus"),
      /*mutations=*/10000);
}

}  // namespace
}  // namespace fsdp::checkpoint
