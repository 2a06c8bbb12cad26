#include "replicas/live_log.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/time/clock.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "comm/local/local_communicator.h"
#include "replicas/membership/testing/memory_registers.h"

namespace {

// Behind so many entries a folder cannot be read; -1: never.
thread_local int entries_left = -1;

}  // namespace

// Takes the place of libc's.
extern "C" dirent* readdir(DIR* folder) {
  static const auto read =
      reinterpret_cast<decltype(&readdir)>(dlsym(RTLD_NEXT, "readdir"));
  if (entries_left == 0) {
    errno = EIO;
    return nullptr;
  }
  if (entries_left > 0) --entries_left;
  return read(folder);
}

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::FreePath;
using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::HasSubstr;

// Is silent for so many votes.
class SilentRegisters final : public testing::ForwardingRegisters {
 public:
  SilentRegisters(Registers* base, std::atomic<int>* silent_votes)
      : ForwardingRegisters(base), silent_votes_(silent_votes) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    if (key.find("/vote/") != std::string::npos && (*silent_votes_)-- > 0) {
      return absl::UnavailableError("the keeper is silent");
    }
    return base()->Set(key, value);
  }

 private:
  std::atomic<int>* const silent_votes_;
};

class LiveLogTest : public ::testing::Test {
 protected:
  LiveLogOptions OptionsOf(int replica, int replicas) {
    LiveLogOptions options;
    options.membership.self = {replica, 1};
    options.membership.replicas = replicas;
    options.membership.steps = 5;
    options.membership.loss_timeout = absl::Seconds(30);
    options.membership.beat_interval = absl::Milliseconds(10);
    options.patience = absl::Seconds(20);
    return options;
  }

  absl::StatusOr<std::unique_ptr<LiveLog>> Start(LiveLogOptions options) {
    return LiveLog::Start(std::move(options), std::make_unique<SilentRegisters>(
                                                  &registers_, &silent_votes_));
  }

  testing::MemoryRegisters registers_;
  std::atomic<int> silent_votes_{0};
};

TEST_F(LiveLogTest, AKeeperThatIsSilentForAWhileCostsNothing) {
  ASSERT_OK_AND_ASSIGN(const auto log, Start(OptionsOf(0, 1)));
  ASSERT_OK_AND_ASSIGN(const Roster roster, log->Enter(0));
  silent_votes_ = 3;
  EXPECT_OK(log->VoteFor(roster));
  ASSERT_OK_AND_ASSIGN(const Roster next,
                       log->AwaitNext(roster, absl::Now() + absl::Minutes(1)));
  EXPECT_EQ(next.step, 1);
}

TEST_F(LiveLogTest, AKeeperThatStaysSilentEndsTheStep) {
  LiveLogOptions options = OptionsOf(0, 1);
  options.patience = absl::Milliseconds(50);
  ASSERT_OK_AND_ASSIGN(const auto log, Start(std::move(options)));
  ASSERT_OK_AND_ASSIGN(const Roster roster, log->Enter(0));
  silent_votes_ = 1'000'000'000;
  EXPECT_THAT(log->VoteFor(roster),
              StatusIs(absl::StatusCode::kUnavailable, _));
}

// They may wait for the stopped rank because of which the replica is lost.
TEST_F(LiveLogTest, RanksOfAReplicaThatIsLostDoNotWaitForEachOther) {
  ASSERT_OK_AND_ASSIGN(const auto inside, comm::CreateLocalGroup(2));
  LiveLogOptions options = OptionsOf(0, 1);
  options.inside = inside[0].get();
  options.membership.ranks_per_replica = 2;
  LiveLogOptions second = OptionsOf(0, 1);
  second.inside = inside[1].get();
  second.membership.ranks_per_replica = 2;
  second.membership.rank = 1;
  ASSERT_OK_AND_ASSIGN(const auto log, Start(std::move(options)));
  absl::Status entered = absl::UnknownError("");
  std::thread other([&] {
    auto stopped = Start(std::move(second));
    EXPECT_OK(stopped.status());
    entered = (*stopped)->Enter(0).status();
  });  // the replica ends with it
  EXPECT_OK(log->Enter(0).status());
  ASSERT_OK_AND_ASSIGN(const auto work,
                       inside[0]->Broadcast(at::ones({1}), 1, "of the test"));
  EXPECT_THAT(work->Wait(absl::Now() + absl::Minutes(1)),
              StatusIs(absl::StatusCode::kAborted, _));
  other.join();
  EXPECT_OK(entered);
}

// It says so, or its launcher has seen it end.
TEST_F(LiveLogTest, WhoEndsIsGoneForTheOthersAtOnce) {
  for (const bool says_so : {false, true}) {
    registers_.Clear();
    ASSERT_OK_AND_ASSIGN(const auto stays, Start(OptionsOf(0, 2)));
    ASSERT_OK_AND_ASSIGN(auto ends, Start(OptionsOf(1, 2)));
    absl::StatusOr<Roster> first = absl::UnknownError("");
    std::thread other([&] { first = ends->Enter(0); });
    ASSERT_OK_AND_ASSIGN(const Roster roster, stays->Enter(0));
    other.join();
    EXPECT_OK(first.status());
    const absl::Time began = absl::Now();
    if (says_so) {
      ends = nullptr;
    } else {
      EXPECT_OK(registers_.Set("gone/1/1", "1"));
    }
    ASSERT_OK_AND_ASSIGN(const Roster next,
                         stays->AwaitNext(roster, began + absl::Minutes(1)));
    EXPECT_EQ(next.cause, Cause::kLost);
    EXPECT_LT(absl::Now() - began, absl::Seconds(15));
  }
}

constexpr int64_t kSteps = 20;

// Replica 1 is lost twice, replica 2 for good.
constexpr char kHistory[] =
    "epoch 0 founded at step 0 by 0.1: replicas 0.1 1.1 2.1\n"
    "epoch 1 within step 3: replicas 0.1 2.1\n"
    "epoch 2 from step 5: replicas 0.1 1.3 2.1\n"
    "epoch 3 within step 8: replicas 0.1 1.3\n";

TEST(ReplayLogTest, ALifeEntersWhereItsFirstStepIs) {
  ASSERT_OK_AND_ASSIGN(const History history,
                       ParseHistory({{"file", kHistory}}));
  for (const ReplicaId self : {ReplicaId{0, 1}, {1, 1}, {2, 1}}) {
    ASSERT_OK_AND_ASSIGN(const Roster founded,
                         ReplayLog(history, self, kSteps).Enter(0));
    EXPECT_EQ(founded.step, 0);
    EXPECT_EQ(founded.cause, Cause::kFounded);
  }
  ASSERT_OK_AND_ASSIGN(const Roster joined,
                       ReplayLog(history, {1, 3}, kSteps).Enter(0));
  EXPECT_EQ(joined.step, 5);
  EXPECT_EQ(joined.epoch, 2);
}

TEST(ReplayLogTest, AFounderBringsTheStateOfItsStep) {
  ASSERT_OK_AND_ASSIGN(const History history,
                       ParseHistory({{"file", kHistory}}));
  ReplayLog founder(history, {0, 1}, kSteps);
  EXPECT_THAT(founder.Enter(/*first_step=*/4),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("4")));
  EXPECT_FALSE(founder.ends_as_recorded());
  EXPECT_OK(ReplayLog(history, {1, 1}, kSteps).Enter(/*first_step=*/4));
}

// An end is as recorded where the history has it, too.
TEST(ReplayLogTest, LivesThatAreNotInTheHistoryAreRefused) {
  using Code = absl::StatusCode;
  const struct {
    ReplicaId self;
    int64_t steps;
    Code code;
    std::string text;
    bool as_recorded;
  } cases[] = {
      {{1, 2}, kSteps, Code::kAborted, "later lives", true},
      // A replica lost only in the replay must not seem to have come to the
      // end, nor one that the history loses after the steps of this run.
      {{0, 2}, kSteps, Code::kInvalidArgument, "replica 0.1 took", false},
      {{1, 4}, kSteps, Code::kInvalidArgument, "replica 1.3 took", false},
      {{2, 2}, 8, Code::kInvalidArgument, "replica 2.1 took", false},
      // These come after the end, or after this run's.
      {{2, 2}, kSteps, Code::kInvalidArgument, "of replica 2.2 before", true},
      {{3, 1}, kSteps, Code::kInvalidArgument, "before step 20", true},
      {{1, 3}, 5, Code::kInvalidArgument, "before step 5", true},
  };
  ASSERT_OK_AND_ASSIGN(const History history,
                       ParseHistory({{"file", kHistory}}));
  for (const auto& one : cases) {
    ReplayLog log(history, one.self, one.steps);
    EXPECT_THAT(log.Enter(/*first_step=*/0),
                StatusIs(one.code, HasSubstr(one.text)));
    EXPECT_EQ(log.ends_as_recorded(), one.as_recorded) << one.text;
  }
}

TEST(ReplayLogTest, WhoIsLostIsToldSo) {
  ASSERT_OK_AND_ASSIGN(const History history,
                       ParseHistory({{"file", kHistory}}));
  ReplayLog lost(history, {2, 1}, kSteps);
  ReplayLog left(history, {0, 1}, kSteps);
  ASSERT_OK_AND_ASSIGN(Roster roster, left.Enter(/*first_step=*/0));
  while (roster.step < 8) {
    ASSERT_OK_AND_ASSIGN(roster, left.SkipLosses(roster));
    EXPECT_OK(lost.SkipLosses(roster));
    ASSERT_OK_AND_ASSIGN(roster, left.AwaitNext(roster, {}));
  }
  EXPECT_FALSE(lost.ends_as_recorded());
  EXPECT_THAT(lost.SkipLosses(roster),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("in step 8")));
  EXPECT_TRUE(lost.ends_as_recorded());
  ASSERT_OK_AND_ASSIGN(roster, left.SkipLosses(roster));
  EXPECT_EQ(Describe(roster).substr(Describe(roster).find("): ")),
            "): 0.1 1.3");
  while (roster.step < kSteps) {
    ASSERT_OK_AND_ASSIGN(roster, left.AwaitNext(roster, {}));
  }
  EXPECT_FALSE(left.ends_as_recorded());
}

Roster MakeRoster(int64_t epoch, int64_t step, Cause cause,
                  std::vector<Member> members) {
  return {/*number=*/epoch,   epoch, step,
          /*notices_seen=*/0, cause, std::move(members)};
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
  std::string text;
  for (const auto& [epoch, span] : history) text += ToLine(span) + "\n";
  EXPECT_EQ(text,
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

TEST(HistoryFileTest, AFolderThatCannotBeReadToItsEndIsAnError) {
  const std::string folder = FreePath("history");
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/notes");
  std::ofstream(folder + "/more_notes");
  entries_left = 3;  // of four, with "." and ".."
  const absl::Status status = ReadHistory(folder).status();
  entries_left = -1;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("reading the folder " + folder));
}

TEST(HistoryFileTest, TheHistoryOfAnotherRunIsLeftAlone) {
  const std::string folder = FreePath("history");
  ASSERT_OK(HistoryFile::Open(folder, {2, 1}).status());
  ASSERT_OK(HistoryFile::Open(folder, {2, 2}).status());  // its second life
  EXPECT_THAT(
      HistoryFile::Open(folder, {2, 1}).status(),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("another run")));
}

TEST(HistoryFileTest, AFolderThatCannotBeIsAnErrorAndNoException) {
  const std::string name(300, 'h');  // longer than any file system allows
  EXPECT_THAT(
      HistoryFile::Open(FreePath("history") + "/" + name, {0, 1}).status(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("opening the history of replicas")));
}

}  // namespace
}  // namespace fsdp::replicas
