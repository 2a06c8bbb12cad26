#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"

namespace fsdp::comm {
namespace {

TEST(RankNamesTest, TheWorldHasNumbersAlone) {
  const RankNames world(4);
  EXPECT_EQ(world.size(), 4);
  EXPECT_EQ(world.world_rank(3), 3);
  EXPECT_EQ(world.Name(1), "rank 1");
  EXPECT_EQ(world.Place(1), "rank 1 of 4");
  EXPECT_EQ(world.List({2}), "rank 2");
  EXPECT_EQ(world.List({0, 3}), "ranks 0, 3");
  EXPECT_EQ(world.NameInWorld(5), "rank 5");
}

TEST(RankNamesTest, APartSaysTheRankInTheWorldToo) {
  const RankNames part = RankNames(8).Part({5, 1, 7});
  EXPECT_EQ(part.size(), 3);
  EXPECT_EQ(part.world_rank(0), 5);
  EXPECT_EQ(part.Name(0), "rank 0 (world rank 5)");
  EXPECT_EQ(part.Place(2), "rank 2 of 3 (world rank 7)");
  EXPECT_EQ(part.List({1}), "rank 1 (world rank 1)");
  EXPECT_EQ(part.List({0, 2}), "ranks 0, 2 (world ranks 5, 7)");
  EXPECT_EQ(part.NameInWorld(5), "world rank 5");
}

TEST(RankNamesTest, APartOfAPartSaysTheRankInTheWorld) {
  const RankNames part = RankNames(8).Part({1, 3, 5, 7}).Part({2, 3});
  EXPECT_EQ(part.Place(0), "rank 0 of 2 (world rank 5)");
  EXPECT_EQ(part.Name(1), "rank 1 (world rank 7)");
}

TEST(RankNamesTest, AllInTheirOrderAreTheGroup) {
  EXPECT_EQ(RankNames(2).Part({0, 1}).Place(1), "rank 1 of 2");
  EXPECT_EQ(RankNames(2).Part({1, 0}).Place(1), "rank 1 of 2 (world rank 0)");
  EXPECT_EQ(RankNames(3).Part({0, 1}).Place(1), "rank 1 of 2 (world rank 1)");
  const RankNames part = RankNames(8).Part({4, 6});
  EXPECT_EQ(part.Part({0, 1}).Place(1), "rank 1 of 2 (world rank 6)");
}

TEST(RankNamesTest, AGroupMayBeToldWhoItsRanksAre) {
  EXPECT_EQ(RankNames::Of(2, {4, 6})->Name(1), "rank 1 (world rank 6)");
  EXPECT_EQ(RankNames::Of(2, {})->Name(1), "rank 1");
  EXPECT_EQ(RankNames::Of(2, {RankNames::kNobodyKnows, 6})->Place(0),
            "rank 0 of 2");
  EXPECT_EQ(RankNames::Of(2, {RankNames::kNobodyKnows, 6})->List({0, 1}),
            "ranks 0, 1");
  EXPECT_THAT(RankNames::Of(2, {4, 5, 6}),
              ::fsdp::testing::StatusIs(
                  absl::StatusCode::kInvalidArgument,
                  ::testing::HasSubstr("a group of 2 ranks, and 3 ranks")));
}

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
