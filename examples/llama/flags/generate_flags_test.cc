#include "examples/llama/flags/generate_flags.h"

#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

GenerateFlags Sound() {
  GenerateFlags flags;
  flags.model = "m";
  flags.prompt = "p";
  return flags;
}

TEST(GenerateFlagsTest, TheDefaultsAreSound) { EXPECT_OK(Check(Sound())); }

TEST(GenerateFlagsTest, SaysWhatCannotBe) {
  using Change = std::function<void(GenerateFlags&)>;
  const std::pair<Change, std::string> cases[] = {
      {[](GenerateFlags& f) { f.model = ""; }, "--model=DIR"},
      {[](GenerateFlags& f) { f.prompt = ""; }, "--prompt=TEXT"},
      {[](GenerateFlags& f) { f.tokens = "1"; }, "either"},
      {[](GenerateFlags& f) { f.batch = true; }, "add --tokens=-"},
      {[](GenerateFlags& f) { f.max_tokens = 0; }, "--max_tokens=0"},
      {[](GenerateFlags& f) { f.threads = -1; }, "--threads=-1"},
      {[](GenerateFlags& f) { f.sampling.temperature = -1; },
       "--temperature=-1"},
      {[](GenerateFlags& f) { f.sampling.temperature = INFINITY; },
       "--temperature=inf"},
      {[](GenerateFlags& f) { f.sampling.top_k = -1; }, "--top_k=-1"},
      {[](GenerateFlags& f) { f.sampling.top_p = 0; }, "--top_p=0"},
      {[](GenerateFlags& f) { f.sampling.top_p = 1.5; }, "--top_p=1.5"},
      {[](GenerateFlags& f) { f.sampling.top_p = NAN; }, "--top_p=nan"}};
  for (const auto& [change, text] : cases) {
    GenerateFlags flags = Sound();
    change(flags);
    EXPECT_THAT(Check(flags),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  }
}

}  // namespace
}  // namespace llama
