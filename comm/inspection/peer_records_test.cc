#include "comm/inspection/peer_records.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/host/shared_segment.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/record_text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr absl::Duration kLimit = absl::Seconds(30);

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Peers = std::vector<std::unique_ptr<PeerRecords>>;

// One whose calls do not return, once `hangs`, until the end.
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

Peers ConnectPeers(const std::vector<std::string>& hosts,
                   const StorePtr& store) {
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
  const Peers peers =
      ConnectPeers({"a", "a", "a"}, c10::make_intrusive<c10d::HashStore>());
  for (const auto& one : peers) one->Seal();
  for (int rank = 0; rank < 3; ++rank) Call(*peers[rank], std::to_string(rank));
  Call(*peers[1], "again");
  for (const auto& one : peers) {
    // Nobody is waited for.
    const auto seen = one->Read(absl::InfiniteFuture(), absl::InfiniteFuture());
    ASSERT_THAT(seen, SizeIs(3));
    EXPECT_EQ(Labels(seen[0]), std::vector<std::string>({"0"}));
    EXPECT_EQ(Labels(seen[1]), std::vector<std::string>({"1", "again"}));
    EXPECT_EQ(Labels(seen[2]), std::vector<std::string>({"2"}));
    EXPECT_THAT(seen[one->rank() == 0 ? 1 : 0].process, HasSubstr(" runs"));
  }
}

TEST(PeerRecordsTest, RanksOfOtherHostsShowWhatTheyPublish) {
  const Peers peers =
      ConnectPeers({"a", "b", "b"}, c10::make_intrusive<c10d::HashStore>());
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
  const Peers peers =
      ConnectPeers({"a", "b"}, c10::make_intrusive<c10d::HashStore>());
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
  // It is not asked again, by however long a deadline.
  peers[0]->Publish(absl::InfiniteFuture());
  peers[0]->Read(absl::InfiniteFuture(), absl::InfiniteFuture());
  peers[1]->Publish(absl::Now() + absl::Milliseconds(20));
  peers[1]->Publish(absl::InfiniteFuture());
  store->hangs = false;
  store->released.Notify();
}

TEST(PeerRecordsTest, OneRankOfEachHostClaims) {
  const Peers peers = ConnectPeers({"a", "a", "b", "b"},
                                   c10::make_intrusive<c10d::HashStore>());
  EXPECT_TRUE(peers[1]->ClaimForHost());
  EXPECT_FALSE(peers[0]->ClaimForHost());
  EXPECT_TRUE(peers[2]->ClaimForHost());
  EXPECT_FALSE(peers[3]->ClaimForHost());
}

// A host that another one's name begins with, and bytes of nobody.
TEST(PeerRecordsTest, WhatIsNoIntroductionIsNotOpened) {
  const Peers peers =
      ConnectPeers({"a", "ab"}, c10::make_intrusive<c10d::HashStore>());
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

}  // namespace
}  // namespace fsdp::comm
