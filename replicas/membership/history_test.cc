#include "replicas/membership/history.h"

#include <utility>

#include "base/testing/status_matchers.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr char kText[] =
    "epoch 0 founded at step 3 by 1.0: replicas 0.0 1.0 2.0\n"
    "epoch 1 within step 5: replicas 0.0 2.0\n"
    "epoch 2 within step 5: replicas 0.0\n"
    "epoch 3 from step 6: replicas 0.0 1.1\n"
    "epoch 4 from step 8: replicas 0.0 1.1 2.3\n"
    "epoch 5 within step 8: replicas 1.1 2.3\n"
    "epoch 6 from step 9: replicas 0.1 2.3\n";

std::string ToText(const absl::StatusOr<History>& history) {
  EXPECT_OK(history.status());
  std::string text;
  if (!history.ok()) return text;
  for (const auto& [epoch, span] : *history) text += ToLine(span) + "\n";
  return text;
}

Roster MakeRoster(int64_t epoch, int64_t step, Cause cause,
                  std::vector<Member> members) {
  return {/*number=*/2 * epoch, epoch, step,
          /*notices_seen=*/0,   cause, std::move(members)};
}

TEST(HistoryTest, LinesAreAsTheyAreDocumented) {
  EXPECT_EQ(ToLine(SpanOf(MakeRoster(0, 2, Cause::kFounded,
                                     {{{0, 1}, true}, {{2, 0}, false}}))),
            "epoch 0 founded at step 2 by 2.0: replicas 0.1 2.0");
  EXPECT_EQ(ToLine(SpanOf(MakeRoster(1, 4, Cause::kLost, {{{2, 0}, false}}))),
            "epoch 1 within step 4: replicas 2.0");
  EXPECT_EQ(ToLine(SpanOf(MakeRoster(2, 5, Cause::kFinished,
                                     {{{0, 2}, true}, {{2, 0}, false}}))),
            "epoch 2 from step 5: replicas 0.2 2.0");
}

// The files are of a replica that was lost, one that came then, and one that
// was there for long.
TEST(HistoryTest, PartsOfARunAreOneHistory) {
  const std::string text = kText;
  const size_t third = text.find("epoch 2");
  const size_t fifth = text.find("epoch 4");
  EXPECT_EQ(ToText(ParseHistory({{"a", "# a comment\n\n" + text.substr(fifth)},
                                 {"b", text.substr(0, third)},
                                 {"c", text.substr(0, fifth)}})),
            kText);
  EXPECT_EQ(ToText(ParseHistory({{"a", ""}})), "");
}

// An epoch before it may be missing.
TEST(HistoryTest, TheLastFoundingIsTheBeginning) {
  const std::string founded =
      "epoch 9 founded at step 7 by 0.2: replicas 0.2 1.2\n";
  EXPECT_EQ(
      ToText(ParseHistory({{"a", kText + founded},
                           {"b", "epoch 10 from step 8: replicas 0.2\n"}})),
      founded + "epoch 10 from step 8: replicas 0.2\n");
}

TEST(HistoryTest, OtherLinesAreRefusedByFileAndNumber) {
  for (const std::string line :
       {"epoch 7", "epoch 7 from step 9", "epoch 7 from step 10: replicas ",
        "epoch 7 from step 10: replicas 1.0 0.0",
        "epoch 7 from step 10: replicas 1.0 1.1",
        "epoch 7 from step 010: replicas 1.0",
        "epoch +7 from step 10: replicas 1.0",
        "epoch 7 from step -1: replicas 1.0",
        "epoch 7 from step 10: replicas 1.0 ",
        "epoch 7 founded at step 10: replicas 1.0",
        "epoch 7 founded at step 10 by 0.0: replicas 1.0",
        "epoch 7 from step 99999999999999999999: replicas 1.0",
        "epoch 7 from step 9223372036854775807: replicas 1.0"}) {
    EXPECT_THAT(
        ParseHistory({{"a", ""}, {"b", kText + line}}).status(),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("b: line 8")))
        << line;
  }
}

TEST(HistoryTest, EpochsThatDoNotFitAreRefused) {
  const std::pair<std::string, std::string> cases[] = {
      {"epoch 6 from step 10: replicas 1.0", "different runs"},
      {"epoch 8 from step 10: replicas 1.0", "missing"},
      {"epoch 7 from step 8: replicas 1.0", "an earlier one"},
      {"epoch 7 from step 9: replicas 1.0", "begun already"},
      {"epoch 7 within step 9: replicas 0.1 2.3", "nobody is lost"},
      {"epoch 7 within step 9: replicas 0.2", "nobody is lost"},
      {"epoch 7 within step 8: replicas 0.1", "an earlier one"}};
  for (const auto& [line, why] : cases) {
    EXPECT_THAT(ParseHistory({{"a", kText}, {"b", line}}).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)))
        << line;
  }
  EXPECT_THAT(
      ParseHistory({{"a", "epoch 1 from step 8: replicas 0.0"}}).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("missing")));
}

TEST(HistoryTest, TheLogIsMadeAgain) {
  ASSERT_OK_AND_ASSIGN(const History history, ParseHistory({{"a", kText}}));
  Roster roster = FirstEntry(history);
  std::vector<std::string> entries;
  while (roster.step < 11) {
    entries.push_back(Describe(roster));
    roster = EntryAfter(history, roster);
  }
  EXPECT_THAT(entries,
              ::testing::ElementsAre(
                  "entry 0 (step 3, epoch 0, founded): 0.0(new) 1.0 2.0(new)",
                  "entry 1 (step 4, epoch 0, finished): 0.0 1.0 2.0",
                  "entry 2 (step 5, epoch 0, finished): 0.0 1.0 2.0",
                  "entry 3 (step 5, epoch 1, lost): 0.0 2.0",
                  "entry 4 (step 5, epoch 2, lost): 0.0",
                  "entry 5 (step 6, epoch 3, finished): 0.0 1.1(new)",
                  "entry 6 (step 7, epoch 3, finished): 0.0 1.1",
                  "entry 7 (step 8, epoch 4, finished): 0.0 1.1 2.3(new)",
                  "entry 8 (step 8, epoch 5, lost): 1.1 2.3(new)",
                  "entry 9 (step 9, epoch 6, finished): 0.1(new) 2.3",
                  "entry 10 (step 10, epoch 6, finished): 0.1 2.3"));
}

}  // namespace
}  // namespace fsdp::replicas
