#include "replicas/history_file.h"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/real_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::checkpoint::testing::FreePath;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

Roster MakeRoster(int64_t epoch, int64_t step, Cause cause,
                  std::vector<Member> members) {
  Roster roster;
  roster.number = epoch;
  roster.epoch = epoch;
  roster.step = step;
  roster.cause = cause;
  roster.members = std::move(members);
  return roster;
}

TEST(HistoryFileTest, FilesOfAllReplicasAreOneHistory) {
  const std::string folder = FreePath("history");
  ASSERT_OK_AND_ASSIGN(const auto first, HistoryFile::Open(folder, {0, 1}));
  ASSERT_OK_AND_ASSIGN(const auto second, HistoryFile::Open(folder, {1, 2}));
  const Roster founded = MakeRoster(0, 0, Cause::kFounded, {{{0, 1}, false}});
  const Roster joined =
      MakeRoster(1, 4, Cause::kFinished, {{{0, 1}, false}, {{1, 2}, true}});
  const Roster lost = MakeRoster(2, 6, Cause::kLost, {{{1, 2}, false}});
  ASSERT_OK(first->Add(founded));
  ASSERT_OK(first->Add(joined));
  ASSERT_OK(second->Add(joined));
  ASSERT_OK(second->Add(joined));
  ASSERT_OK(second->Add(lost));
  std::ofstream(folder + "/notes") << "not of a replica";
  ASSERT_OK_AND_ASSIGN(const History history, ReadHistory(folder));
  EXPECT_EQ(history.ToText(),
            "epoch 0 founded at step 0 by 0.1: replicas 0.1\n"
            "epoch 1 from step 4: replicas 0.1 1.2\n"
            "epoch 2 within step 6: replicas 1.2\n");
}

TEST(HistoryFileTest, WhatIsWrongIsSaidByFile) {
  const std::string folder = FreePath("history");
  EXPECT_THAT(ReadHistory(folder).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder)));
  std::filesystem::create_directory(folder);
  EXPECT_THAT(
      ReadHistory(folder).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no history")));
  std::ofstream(folder + "/replica-3.txt") << "epoch\n";
  EXPECT_THAT(
      ReadHistory(folder).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("replica-3.txt")));
  ASSERT_EQ(mkfifo((folder + "/replica-4.txt").c_str(), 0600), 0);
  std::filesystem::remove(folder + "/replica-3.txt");
  EXPECT_THAT(ReadHistory(folder).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("replica-4.txt: it is no regular file")));
}

TEST(HistoryFileTest, TheHistoryOfAnotherRunIsLeftAlone) {
  const std::string folder = FreePath("history");
  ASSERT_OK(HistoryFile::Open(folder, {2, 1}).status());
  ASSERT_OK(HistoryFile::Open(folder, {2, 2}).status());  // its second life
  EXPECT_THAT(
      HistoryFile::Open(folder, {2, 1}).status(),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("another run")));
}

}  // namespace
}  // namespace fsdp::replicas
