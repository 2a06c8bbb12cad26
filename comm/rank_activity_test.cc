#include "comm/rank_activity.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

class Notes final : public RankActivity {
 public:
  void Note(Phase phase, absl::string_view unit,
            int64_t /*pool_bytes*/) override {
    texts.push_back(absl::StrCat(PhaseName(phase), " ", unit));
  }
  uint64_t BeginWait(StoreWait wait, absl::string_view what) override {
    texts.push_back(StoreWaitText(wait, what));
    return 7;
  }
  void EndWait(uint64_t wait) override {
    texts.push_back(absl::StrCat("end of ", wait));
  }
  std::string Describe() const override { return ""; }

  std::vector<std::string> texts;
};

TEST(RankActivityTest, ScopesNoteWhatTheyAre) {
  const auto notes = std::make_shared<Notes>();
  {
    const PhaseScope phase(notes, Phase::kStep, "blocks.3");
    const StoreWaitScope wait(notes.get(), StoreWait::kRead, "unit blocks.3");
  }
  EXPECT_THAT(notes->texts,
              ::testing::ElementsAre(
                  "the optimizer's step blocks.3",
                  "waits for unit blocks.3 to be read from its store",
                  "end of 7", "outside forward and backward "));
  const PhaseScope nobodys(nullptr, Phase::kStep, "");
  const StoreWaitScope wait(nullptr, StoreWait::kRead, "");
}

}  // namespace
}  // namespace fsdp::comm
