// One thread plays all ranks: nothing depends on time, since every deadline is
// over before the wait begins.
#include "comm/shared_memory/shared_group.h"

#include <ATen/ops/zeros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Has more chunks than are staged ahead.
constexpr int64_t kLarge = 4 * SharedRankBlock::kSlotBytes;

struct Rank {
  std::shared_ptr<SharedHost> host;
  std::shared_ptr<SharedGroup> group;
  std::unique_ptr<Fence> fence;

  absl::StatusOr<std::shared_ptr<SharedGroup::Operation>> StartAllGather(
      int64_t bytes, const std::string& label) {
    const at::Tensor in = at::zeros({bytes}, at::kByte);
    const at::Tensor out = at::zeros({bytes * group->world_size()}, at::kByte);
    return group->Start({Collective::kAllGather, label, "uint8", bytes, ""},
                        {Collective::kAllGather, out, in},
                        absl::InfinitePast());
  }
};

// Returns connected ranks, with one fence.
std::vector<Rank> Connect(int world_size) {
  std::vector<Rank> ranks(world_size);
  std::vector<SegmentAddress> mailboxes;
  std::vector<std::unique_ptr<SharedSegment>> blocks;
  std::vector<SharedMember> members;
  for (int i = 0; i < world_size; ++i) {
    ranks[i].host = SharedHost::Create(i).value();
    mailboxes.push_back(ranks[i].host->mailbox_address());
    blocks.push_back(SharedGroup::CreateBlock().value());
    members.push_back({i, blocks.back()->address()});
  }
  const std::shared_ptr<SharedSegment> counters =
      SharedSegment::Create(SharedGroup::FenceBytes(world_size)).value();
  for (int i = 0; i < world_size; ++i) {
    EXPECT_OK(ranks[i].host->Connect(mailboxes));
    ranks[i].group = SharedGroup::Create(ranks[i].host, std::move(blocks[i]),
                                         members, RankNames(world_size), i)
                         .value();
    ranks[i].fence = ranks[i].group->MakeFence(counters);
  }
  return ranks;
}

absl::Status WaitFor(Rank& rank, SharedGroup::Operation& operation) {
  return rank.group->Wait(operation, /*inputs_free=*/true,
                          absl::InfinitePast());
}

TEST(SharedGroupTest, ACallMustNotReplaceOneThatAPeerHasYetToCompare) {
  std::vector<Rank> ranks = Connect(2);
  for (int i = 0; i < SharedRankBlock::kCalls; ++i) {
    ASSERT_OK(ranks[0].StartAllGather(4, absl::StrCat("unit ", i))) << i;
  }
  EXPECT_THAT(ranks[0].StartAllGather(4, "one more"),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(HasSubstr("all-gather #64 of one more"),
                             EndsWith("still missing: rank 1 (no call so "
                                      "far)"))));
}

TEST(SharedGroupTest, ADeadlineNamesThoseAloneWhoHaveNotCalled) {
  std::vector<Rank> ranks = Connect(4);
  const auto own = ranks[2].StartAllGather(kLarge, "grads").value();
  ASSERT_OK(ranks[1].StartAllGather(kLarge, "grads"));
  EXPECT_THAT(
      WaitFor(ranks[2], *own),
      StatusIs(Code::kDeadlineExceeded,
               EndsWith("still missing: rank 0 (no call so far), rank 3 (no "
                        "call so far)")));
}

TEST(SharedGroupTest, WhoHasLeftIsNamedAlthoughOthersMayStillCome) {
  std::vector<Rank> ranks = Connect(4);
  ranks[2].group->Leave();
  const auto own = ranks[0].StartAllGather(4, "grads").value();
  EXPECT_THAT(
      WaitFor(ranks[0], *own),
      StatusIs(Code::kUnavailable,
               HasSubstr("rank 2 (no call so far) has left the group")));
}

TEST(SharedGroupTest, WhatARankDidBeforeItLeftCountsAndTheRestIsAwaited) {
  std::vector<Rank> ranks = Connect(3);
  ranks[1].group->Leave();
  // It looks as if rank 1 had arrived between two looks of rank 0 and left
  // then.
  const auto hook = [&, calls = 0]() mutable {
    if (++calls == 2) ranks[1].fence->Arrive();
    return calls < 2;
  };
  {
    absl::MutexLock lock(&ranks[0].host->mutex());
    ranks[0].host->Add(hook);
  }
  ranks[0].fence->Arrive();
  EXPECT_THAT(ranks[0].fence->Wait(absl::InfinitePast()),
              StatusIs(Code::kDeadlineExceeded,
                       EndsWith("still missing: rank 2 (no call so far)")));
}

// A process that sleeps until it is killed. It has whatever was open at its
// start.
class Sleeper {
 public:
  Sleeper() : pid_(fork()) {
    if (pid_ == 0) {
      while (true) pause();
    }
  }
  ~Sleeper() { Kill(); }
  pid_t pid() const { return pid_; }
  void Kill() {
    if (std::exchange(is_alive_, false)) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

 private:
  const pid_t pid_;
  bool is_alive_ = true;
};

// Nobody rings for the dead.
TEST(SharedGroupTest, WhoSleepsNoticesThatAProcessHasEnded) {
  std::vector<Rank> ranks(2);
  for (int i : {0, 1}) ranks[i].host = SharedHost::Create(i).value();
  Sleeper sleeper;
  std::vector<SegmentAddress> mailboxes = {ranks[0].host->mailbox_address(),
                                           ranks[1].host->mailbox_address()};
  mailboxes[1].pid = sleeper.pid();
  ASSERT_OK(ranks[0].host->Connect(mailboxes));
  std::unique_ptr<SharedSegment> own = SharedGroup::CreateBlock().value();
  const std::unique_ptr<SharedSegment> of_peer =
      SharedGroup::CreateBlock().value();
  const std::vector<SharedMember> members = {{0, own->address()},
                                             {1, of_peer->address()}};
  ranks[0].group = SharedGroup::Create(ranks[0].host, std::move(own), members,
                                       RankNames(2), 0)
                       .value();
  const auto hook = [&, calls = 0]() mutable {
    if (++calls == 2) sleeper.Kill();  // rank 0 has slept once
    return calls < 2;
  };
  {
    absl::MutexLock lock(&ranks[0].host->mutex());
    ranks[0].host->Add(hook);
  }
  const auto operation = ranks[0].StartAllGather(4, "grads").value();
  EXPECT_THAT(ranks[0].group->Wait(*operation, /*inputs_free=*/true,
                                   absl::InfiniteFuture()),
              StatusIs(Code::kUnavailable,
                       AllOf(HasSubstr("rank 1 (no call so far; process"),
                             EndsWith("is gone"))));
}

// The failed rank may have written there again since.
TEST(SharedGroupTest, WhatWasReadWhereARankHasItIsOfNoUseOnceItHasFailed) {
  for (bool in_place : {true, false}) {
    std::vector<Rank> ranks = Connect(3);
    std::vector<std::shared_ptr<SharedGroup::Operation>> operations;
    for (Rank& rank : ranks) {
      at::Tensor in = at::zeros({64}, at::kByte);
      if (in_place && rank.group->rank() == 1) {
        in = rank.host->heap()->MakeTensor(SharedSegment::Create(64).value(), 0,
                                           64);
      }
      operations.push_back(
          rank.group
              ->Start({Collective::kAllGather, "flat", "uint8", 64, ""},
                      {Collective::kAllGather, at::zeros({192}, at::kByte), in},
                      absl::InfinitePast())
              .value());
    }
    ranks[1].group->Abort(absl::InternalError("why"));
    const absl::Status status = ranks[0].group->Wait(
        *operations[0], /*inputs_free=*/false, absl::InfinitePast());
    if (in_place) {
      EXPECT_THAT(status,
                  StatusIs(Code::kAborted, HasSubstr("rank 1 aborted: why")));
    } else {
      EXPECT_OK(status);
    }
  }
}

// The last rank is done at once, since no peer has to read anything of it.
TEST(SharedGroupTest, NothingMovesInOneMemoryOfAllRanks) {
  constexpr int64_t kPart = 64;
  std::vector<Rank> ranks = Connect(3);
  const std::shared_ptr<SharedSegment> common =
      SharedSegment::Create(kPart * 3).value();
  for (bool in_place : {true, false}) {
    std::vector<std::shared_ptr<SharedGroup::Operation>> operations;
    for (Rank& rank : ranks) {
      const at::Tensor out =
          rank.host->heap()->MakeTensor(common, 0, kPart * 3);
      const int part = rank.group->rank();
      const at::Tensor in =
          out.narrow(0, kPart * (in_place ? part : 2 - part), kPart);
      operations.push_back(
          rank.group
              ->Start({Collective::kAllGather, "flat", "uint8", kPart, ""},
                      {Collective::kAllGather, out, in}, absl::InfinitePast())
              .value());
    }
    if (in_place) {
      EXPECT_OK(WaitFor(ranks[2], *operations[2]));
    } else {
      EXPECT_THAT(WaitFor(ranks[2], *operations[2]),
                  StatusIs(Code::kDeadlineExceeded,
                           HasSubstr("all-gather #1 of flat")));
    }
  }
}

// A sleeper would otherwise find out only at the next check of processes.
TEST(SharedGroupTest, WhateverAPeerMayWaitForRingsIt) {
  using Step = std::function<void(Rank&)>;
  const std::vector<std::pair<std::string, Step>> steps = {
      {"arrives at a fence", [](Rank& rank) { rank.fence->Arrive(); }},
      {"calls", [](Rank& rank) { EXPECT_OK(rank.StartAllGather(4, "a")); }},
      {"fails",
       [](Rank& rank) { rank.group->Abort(absl::InternalError("why")); }},
      {"leaves", [](Rank& rank) { rank.group->Leave(); }}};
  for (const auto& [what, step] : steps) {
    std::vector<Rank> ranks = Connect(3);
    const uint32_t first = ranks[0].host->NumRings();
    const uint32_t last = ranks[2].host->NumRings();
    step(ranks[1]);
    EXPECT_GT(ranks[0].host->NumRings(), first) << what;
    EXPECT_GT(ranks[2].host->NumRings(), last) << what;
  }
}

TEST(SharedOperationTest, HasAsManyChunksAsAreNotEmptyAndAtLeastOne) {
  const auto chunks = [](int64_t bytes) {
    const CollectiveArgs buffers = {Collective::kAllGather,
                                    at::zeros({2 * bytes}, at::kByte),
                                    at::zeros({bytes}, at::kByte)};
    return SharedOperation(buffers, 0, 2, /*slot_bytes=*/256).num_chunks();
  };
  EXPECT_EQ(chunks(0), 1);
  EXPECT_EQ(chunks(1), 1);
  EXPECT_EQ(chunks(256), 1);
  EXPECT_EQ(chunks(257), 2);
  EXPECT_EQ(chunks(512), 2);
}

}  // namespace
}  // namespace fsdp::comm
