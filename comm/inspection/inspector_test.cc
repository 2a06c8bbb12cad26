// Tests what ranks see of each other and what an inspector makes of it.
#include "comm/inspection/inspector.h"

#include <unistd.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/files/testing/real_files.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::ReadWholeFile;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr absl::Duration kLimit = absl::Seconds(30);
// Is so short that what a test says has waited is due at once.
constexpr absl::Duration kWarnAfter = absl::Milliseconds(40);

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Peers = std::vector<std::unique_ptr<PeerRecords>>;

// A store whose calls do not return, once `hangs`, until the end.
class HangingStore final : public c10d::HashStore {
 public:
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }
  void set(const std::string& key, const std::vector<uint8_t>& data) override {
    if (hangs) released.WaitForNotification();
    HashStore::set(key, data);
  }
  bool check(const std::vector<std::string>& keys) override {
    if (hangs) released.WaitForNotification();
    return HashStore::check(keys);
  }
  std::atomic<bool> hangs{false};
  absl::Notification released;
};

// Connects peers, by rank. Those of equal `hosts` see each other's memory.
Peers ConnectPeers(
    const std::vector<std::string>& hosts,
    const StorePtr& store = c10::make_intrusive<c10d::HashStore>()) {
  Peers peers(hosts.size());
  std::vector<std::thread> threads;
  threads.reserve(hosts.size());
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      peers[rank] = *PeerRecords::Connect(store, static_cast<int>(rank),
                                          static_cast<int>(hosts.size()),
                                          hosts[rank], absl::Now() + kLimit);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return peers;
}

void Call(PeerRecords& peers, const std::string& label) {
  peers.recorder()->Begin({OperationKind::kAllGather, -1, -1, 0, label}, 1);
}

std::vector<std::string> Labels(const SeenRank& seen) {
  std::vector<std::string> labels;
  if (!seen.record) return {"unknown"};
  for (const OperationRecord& operation : seen.record->operations) {
    labels.push_back(operation.label);
  }
  return labels;
}

TEST(PeerRecordsTest, RanksOfOneHostSeeEachOtherAtOnce) {
  const Peers peers = ConnectPeers({"a", "a", "a"});
  for (const auto& one : peers) one->Seal();
  for (int rank = 0; rank < 3; ++rank) Call(*peers[rank], std::to_string(rank));
  Call(*peers[1], "again");
  for (const auto& one : peers) {
    // This waits for nobody.
    const auto seen = one->Read(absl::InfiniteFuture(), absl::InfiniteFuture());
    ASSERT_THAT(seen, SizeIs(3));
    EXPECT_EQ(Labels(seen[0]), std::vector<std::string>({"0"}));
    EXPECT_EQ(Labels(seen[1]), std::vector<std::string>({"1", "again"}));
    EXPECT_EQ(Labels(seen[2]), std::vector<std::string>({"2"}));
    EXPECT_THAT(seen[one->rank() == 0 ? 1 : 0].process,
                ::testing::HasSubstr(" runs"));
  }
}

TEST(PeerRecordsTest, RanksOfOtherHostsShowWhatTheyPublish) {
  const Peers peers = ConnectPeers({"a", "b", "b"});
  Call(*peers[1], "first");
  const auto soon = [] { return absl::Now() + absl::Milliseconds(50); };
  EXPECT_EQ(Labels(peers[0]->Read(absl::Now(), soon())[1]),
            std::vector<std::string>({"unknown"}));
  const absl::Time before = absl::Now();
  peers[1]->Publish(absl::Now() + kLimit);
  Call(*peers[1], "second");
  EXPECT_EQ(Labels(peers[0]->Read(before, soon())[1]),
            std::vector<std::string>({"first"}));
  EXPECT_EQ(Labels(peers[2]->Read(before, soon())[1]),
            std::vector<std::string>({"first", "second"}));
}

// The other rank publishes while this one looks.
TEST(PeerRecordsTest, WaitsForWhatIsFresh) {
  const Peers peers = ConnectPeers({"a", "b"});
  const absl::Time begin = absl::Now();
  std::thread other([&] {
    Call(*peers[1], "late");
    peers[1]->Publish(absl::Now() + kLimit);
  });
  const auto seen = peers[0]->Read(begin, absl::Now() + kLimit);
  other.join();
  EXPECT_EQ(Labels(seen[1]), std::vector<std::string>({"late"}));
}

TEST(PeerRecordsTest, AStoreThatDoesNotAnswerIsGivenUp) {
  const auto store = c10::make_intrusive<HangingStore>();
  const Peers peers = ConnectPeers({"a", "b"}, store);
  store->hangs = true;
  Call(*peers[0], "own");
  const auto seen =
      peers[0]->Read(absl::Now(), absl::Now() + absl::Milliseconds(20));
  EXPECT_EQ(Labels(seen[0]), std::vector<std::string>({"own"}));
  EXPECT_EQ(Labels(seen[1]), std::vector<std::string>({"unknown"}));
  // The store is not asked again, however long the deadline.
  peers[0]->Publish(absl::InfiniteFuture());
  peers[0]->Read(absl::InfiniteFuture(), absl::InfiniteFuture());
  peers[1]->Publish(absl::Now() + absl::Milliseconds(20));
  peers[1]->Publish(absl::InfiniteFuture());
  store->hangs = false;
  store->released.Notify();
}

TEST(PeerRecordsTest, OneRankOfEachHostClaims) {
  const Peers peers = ConnectPeers({"a", "a", "b", "b"});
  EXPECT_TRUE(peers[1]->ClaimForHost());
  EXPECT_FALSE(peers[0]->ClaimForHost());
  EXPECT_TRUE(peers[2]->ClaimForHost());
  EXPECT_FALSE(peers[3]->ClaimForHost());
}

// The name of one host begins with that of the other, and the bytes are
// nobody's.
TEST(PeerRecordsTest, WhatIsNoIntroductionIsNotOpened) {
  const Peers peers = ConnectPeers({"a", "ab"});
  Call(*peers[1], "unseen");
  EXPECT_EQ(Labels(peers[0]->Read(absl::InfiniteFuture(), absl::Now())[1]),
            std::vector<std::string>({"unknown"}));
  for (const std::string& wrong :
       {std::string("a\nshort"),
        "a\n" + std::string(sizeof(SegmentAddress), '\7')}) {
    const auto fresh = c10::make_intrusive<c10d::HashStore>();
    fresh->set("inspection/1",
               std::vector<uint8_t>(wrong.begin(), wrong.end()));
    auto alone = PeerRecords::Connect(fresh, 0, 2, "a", absl::Now() + kLimit);
    ASSERT_TRUE(alone.ok());
    EXPECT_EQ(Labels((*alone)->Read(absl::InfiniteFuture(), absl::Now())[1]),
              std::vector<std::string>({"unknown"}));
  }
}

// Records `count` calls of the group of all ranks. The last one has been waited
// for since `ago`, the others are done.
FlightRecorder::Ticket Call(FlightRecorder& recorder, int count,
                            absl::Duration ago) {
  const int group = recorder.AddGroup(1);
  const int64_t then = absl::ToUnixNanos(absl::Now() - ago);
  FlightRecorder::Ticket ticket;
  for (int i = 0; i < count; ++i) {
    ticket = recorder.Begin({OperationKind::kAllGather, /*dtype=*/6, group, 64,
                             absl::StrCat("blocks.", i)},
                            then);
    recorder.Started(ticket, -1);
    recorder.Waits(ticket, then);
    if (i + 1 < count) recorder.Ends(ticket, OperationState::kDone, then);
  }
  return ticket;
}

// Collects what an inspector writes.
class Written {
 public:
  void operator()(absl::string_view text) {
    absl::MutexLock lock(&mutex_);
    texts_.emplace_back(text);
  }
  // Waits for so many texts, and returns fewer after kLimit.
  std::vector<std::string> Await(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto is_there = [&]() {
      mutex_.AssertHeld();
      return texts_.size() >= count;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&is_there), kLimit);
    return texts_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::string> texts_ ABSL_GUARDED_BY(mutex_);
};

InspectorOptions WritingTo(Written& written,
                           absl::Duration warn_after = kWarnAfter) {
  InspectorOptions options;
  options.warn_after = warn_after;
  options.write = [&written](absl::string_view text) { written(text); };
  return options;
}

TEST(InspectorTest, SaysItAgainAfterTwiceTheTime) {
  Peers peers = ConnectPeers({"a", "a"});
  Written written;
  const absl::Time begin = absl::Now();
  Call(*peers[0]->recorder(), 1, absl::ZeroDuration());
  ASSERT_OK_AND_ASSIGN(
      const auto inspector,
      Inspector::Start(WritingTo(written), std::move(peers[0])));
  EXPECT_THAT(written.Await(3), SizeIs(3));
  EXPECT_GE(absl::Now() - begin, 4 * kWarnAfter);
  inspector->Stop();
}

TEST(InspectorTest, SaysNothingOfWhatNobodyWaitsForOrWhereItIsOff) {
  for (const absl::Duration warn_after : {kWarnAfter, absl::ZeroDuration()}) {
    Peers peers = ConnectPeers({"a", "b"});
    FlightRecorder& recorder = *peers[0]->recorder();
    const FlightRecorder::Ticket ticket = Call(recorder, 3, absl::Seconds(31));
    if (warn_after > absl::ZeroDuration()) {
      recorder.Ends(ticket, OperationState::kDone, 1);
      recorder.Started(recorder.Begin({OperationKind::kAllReduce}, 1), -1);
    }
    Written written;
    InspectorOptions options = WritingTo(written, warn_after);
    options.interval = absl::Milliseconds(5);
    ASSERT_OK_AND_ASSIGN(const auto inspector,
                         Inspector::Start(options, std::move(peers[0])));
    // The inspector publishes whenever it begins to look: at the second time it
    // has looked once.
    for (int looks = 0; looks < 2; ++looks) {
      const auto seen = peers[1]->Read(absl::Now(), absl::Now() + kLimit);
      EXPECT_TRUE(seen[0].record.has_value());
    }
    inspector->Stop();
    EXPECT_THAT(written.Await(0), IsEmpty());
  }
}

TEST(InspectorTest, OneRankOfAHostTellsWhatAllDidWhenTheGroupFailed) {
  Peers peers = ConnectPeers({"a", "a", "a"});
  const auto failed = Call(*peers[1]->recorder(), 3, absl::Seconds(5));
  Call(*peers[2]->recorder(), 1, absl::Seconds(5));
  Call(*peers[0]->recorder(), 3, absl::Seconds(5));
  Written written;
  InspectorOptions options = WritingTo(written, absl::ZeroDuration());
  // The inspector makes this folder.
  options.folder = absl::StrCat(::testing::TempDir(), "/inspection.", getpid());
  for (const int rank : {1, 0}) {
    ASSERT_OK_AND_ASSIGN(const auto inspector,
                         Inspector::Start(options, std::move(peers[rank])));
    inspector->OnFailure(failed, absl::DeadlineExceededError("not done"));
    // Rank 2 catches up when the others have given up, which changes nothing.
    for (int i = 0; i < 2; ++i) {
      peers[2]->recorder()->Begin({OperationKind::kAllGather, -1, 0}, 1);
    }
    inspector->OnFailure(failed, absl::DeadlineExceededError("a second one"));
    inspector->Stop();
  }
  const std::vector<std::string> texts = written.Await(1);
  ASSERT_THAT(texts, SizeIs(1));
  const auto who_is_behind = AllOf(
      HasSubstr("rank 1 has failed (DEADLINE_EXCEEDED: not done)"),
      HasSubstr("\nranks 0, 1 are in it; rank 2 is behind by 2 calls: it is "
                "in all-gather #0 of blocks.0"),
      HasSubstr("\nrank 0 (process "),
      HasSubstr("  all-gather #1 of blocks.1, float32, 64 bytes: done in"));
  EXPECT_THAT(texts[0], who_is_behind);
  EXPECT_THAT(ReadWholeFile(absl::StrCat(options.folder, "/rank-1.txt")),
              who_is_behind);
  EXPECT_THAT(ReadWholeFile(absl::StrCat(options.folder, "/rank-0.txt")),
              AllOf(HasSubstr("rank 0 has failed"),
                    ::testing::Not(HasSubstr("a second one"))));
}

TEST(InspectorTest, OnlyFailuresThatNobodyElseExplainsAreShown) {
  for (const absl::Status& status : {absl::AbortedError("rank 1 aborted"),
                                     absl::InvalidArgumentError("x")}) {
    Peers peers = ConnectPeers({"a", "a"});
    const auto failed = Call(*peers[0]->recorder(), 1, absl::Seconds(1));
    Written written;
    ASSERT_OK_AND_ASSIGN(
        const auto inspector,
        Inspector::Start(WritingTo(written, absl::ZeroDuration()),
                         std::move(peers[0])));
    inspector->OnFailure(failed, status);
    inspector->Stop();
    EXPECT_THAT(written.Await(0), IsEmpty());
  }
}

TEST(InspectorTest, AFolderThatIsNotThereIsNamed) {
  Peers peers = ConnectPeers({"a", "a"});
  const auto failed = Call(*peers[0]->recorder(), 1, absl::Seconds(1));
  Written written;
  InspectorOptions options = WritingTo(written, absl::ZeroDuration());
  options.folder = "/there/is/no/such/folder";
  ASSERT_OK_AND_ASSIGN(const auto inspector,
                       Inspector::Start(options, std::move(peers[0])));
  inspector->OnFailure(failed, absl::AbortedError("x"));
  inspector->Stop();
  EXPECT_THAT(
      written.Await(1),
      ::testing::ElementsAre(HasSubstr("/there/is/no/such/folder/rank-0.txt")));
}

TEST(InspectorTest, SaysWhyItDoesNotStart) {
  Peers peers = ConnectPeers({"a", "a"});
  const ::fsdp::testing::NoThreads none;
  EXPECT_THAT(
      Inspector::Start({}, std::move(peers[0])).status(),
      ::fsdp::testing::StatusIs(absl::StatusCode::kResourceExhausted,
                                HasSubstr("to watch for ranks that hang")));
}

}  // namespace
}  // namespace fsdp::comm
