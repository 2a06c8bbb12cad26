#include "comm/inspection/peer_records.h"

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/allocations.h"
#include "comm/rank_activity.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::SizeIs;

constexpr absl::Duration kLimit = absl::Seconds(30);

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

using ::fsdp::testing::Allocations;
using ::testing::Le;

// Returns the largest record there can be.
RankRecord FullRecord() {
  FlightRecorder recorder;
  for (uint64_t id = 1; id <= FlightRecorder::kGroups; ++id) {
    recorder.AddGroup(id);
  }
  recorder.Note(Phase::kBackward, std::string(200, 'u'), 12345, 99);
  recorder.BeginWait(StoreWait::kWrite, std::string(200, 'w'), 101);
  for (int i = 0; i < 150; ++i) {
    const FlightRecorder::Ticket ticket = recorder.Begin(
        {OperationKind::kAllToAll, 6, i % 32, i, std::string(200, 'b')}, i);
    recorder.Started(ticket, i + 1000);
    recorder.Waits(ticket, i + 1);
    recorder.Ends(ticket, OperationState::kFailed, i + 2);
  }
  return recorder.Read(777);
}

std::string TextOf(const RankRecord& record) {
  SeenRank seen;
  seen.record = record;
  return RecordText(0, seen, kSentOperations);
}

TEST(RecordCodecTest, AFullRecordFitsAndComesBack) {
  const RankRecord full = FullRecord();
  const std::string bytes = EncodeRecord(full);
  EXPECT_THAT(bytes, SizeIs(Le(kMaxEncodedBytes)));
  const std::optional<RankRecord> back = DecodeRecord(bytes);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->pid, full.pid);
  EXPECT_EQ(back->taken_ns, 777);
  EXPECT_EQ(back->phase, Phase::kBackward);
  EXPECT_EQ(back->unit, full.unit);
  EXPECT_EQ(back->phase_ns, 99);
  EXPECT_EQ(back->pool_bytes, 12345);
  EXPECT_EQ(back->wait, StoreWait::kWrite);
  EXPECT_EQ(back->wait_what, full.wait_what);
  EXPECT_EQ(back->wait_ns, 101);
  EXPECT_EQ(back->num_operations, 150);
  ASSERT_THAT(back->groups, SizeIs(32));
  EXPECT_EQ(back->groups[31].id, 32);
  EXPECT_EQ(back->groups[31].calls, full.groups[31].calls);
  ASSERT_THAT(back->operations, SizeIs(kSentOperations));
  EXPECT_EQ(back->operations.back().ticket, 150);
  EXPECT_EQ(back->operations.front().ticket, 150 - kSentOperations + 1);
  EXPECT_EQ(back->operations.back().group, 149 % 32);
  EXPECT_EQ(back->operations.back().call, full.operations.back().call);
  EXPECT_EQ(TextOf(*back), TextOf(full));
}

TEST(RecordCodecTest, WhatIsTooShortOrTooLongIsRefused) {
  const std::string bytes = EncodeRecord(FullRecord());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeRecord(bytes.substr(0, size)).has_value()) << size;
  }
  EXPECT_FALSE(DecodeRecord(bytes + "x").has_value());
  Allocations::Start();
  EXPECT_FALSE(
      DecodeRecord(std::string(kMaxEncodedBytes + 1, '\1')).has_value());
  EXPECT_THAT(Allocations::Largest(), Le(2 * kMaxEncodedBytes));
}

TEST(RecordCodecTest, OtherBytesGiveNothingOrWhatIsBounded) {
  std::mt19937 random(1);
  const std::string bytes = EncodeRecord(FullRecord());
  int refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string wrong = bytes;
    for (int i = 0; i < 1 + round % 5; ++i) {
      wrong[random() % wrong.size()] = static_cast<char>(random());
    }
    const std::optional<RankRecord> record = DecodeRecord(wrong);
    if (!record) {
      ++refused;
      continue;
    }
    EXPECT_LT(static_cast<int>(record->phase), kNumPhases);
    EXPECT_LT(static_cast<int>(record->wait), kNumStoreWaits);
    EXPECT_THAT(record->operations, SizeIs(Le(kSentOperations)));
    for (const OperationRecord& operation : record->operations) {
      EXPECT_LT(static_cast<int>(operation.kind), kNumOperationKinds);
      EXPECT_LT(static_cast<int>(operation.state), kNumOperationStates);
      EXPECT_GE(operation.group, -1);
      for (const unsigned char c : operation.label) EXPECT_GE(c, ' ');
    }
    EXPECT_FALSE(TextOf(*record).empty());
  }
  EXPECT_GT(refused, 50);
  EXPECT_LT(refused, 4950);
}

}  // namespace
}  // namespace fsdp::comm
