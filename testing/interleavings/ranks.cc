#include "testing/interleavings/ranks.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "testing/interleavings/machine.h"

namespace fsdp::interleavings {
namespace {

using ::fsdp::comm::SegmentAddress;
using ::fsdp::comm::SharedGroup;
using ::fsdp::comm::SharedHost;
using ::fsdp::comm::SharedMailbox;
using ::fsdp::comm::SharedMember;
using ::fsdp::comm::SharedRankBlock;
using ::fsdp::comm::SharedSegment;

void NameWithin(Arena& arena, uint64_t segment, size_t begin, size_t bytes,
                const char* name) {
  arena.Name(segment + begin, static_cast<int64_t>(bytes), name);
}

void NameMailbox(Arena& arena, uint64_t at) {
  // The first members are private; their order is that of the header.
  NameWithin(arena, at, 0, 4, "rings");
  NameWithin(arena, at, 4, 4, "sleepers");
  NameWithin(arena, at, offsetof(SharedMailbox, frees), 8, "frees");
}

void NameBlock(Arena& arena, uint64_t at) {
  using Block = SharedRankBlock;
  NameWithin(arena, at, offsetof(Block, arrived), 8, "arrived");
  NameWithin(arena, at, offsetof(Block, staged), 8, "staged");
  NameWithin(arena, at, offsetof(Block, reduced), 8, "reduced");
  NameWithin(arena, at, offsetof(Block, read), 8, "read");
  NameWithin(arena, at, offsetof(Block, finished), 8, "finished");
  NameWithin(arena, at, offsetof(Block, status), 4, "status");
  NameWithin(arena, at, offsetof(Block, failure_code),
             sizeof(Block::failure_code) + sizeof(Block::failure), "failure");
  NameWithin(arena, at, offsetof(Block, calls), sizeof(Block::calls), "calls");
  NameWithin(arena, at, offsetof(Block, slots), sizeof(Block::slots), "slots");
}

uint64_t OffsetOf(const Machine& machine, const SegmentAddress& address) {
  return const_cast<Machine&>(machine)
      .arena()
      .segment(static_cast<int>(address.inode) - 1)
      ->offset;
}

class RanksScenario final : public Scenario {
 public:
  RanksScenario(RanksOptions options, std::vector<RankThread> threads)
      : options_(std::move(options)), threads_(std::move(threads)) {}

  void SetUp(Machine& machine) override {
    Connect(machine);
    if (options_.before) options_.before(ranks_);
    for (const RankThread& thread : threads_) {
      machine.AddThread(thread.rank,
                        [this, &thread] { thread.body(ranks_[thread.rank]); });
    }
  }

 private:
  void Connect(Machine& machine) {
    const int world_size = options_.world_size;
    ranks_.resize(world_size);
    std::vector<SegmentAddress> mailboxes;
    std::vector<std::unique_ptr<SharedSegment>> blocks;
    std::vector<SharedMember> members;
    for (int i = 0; i < world_size; ++i) {
      machine.set_rank(i);
      ranks_[i].rank = i;
      ranks_[i].host = SharedHost::Create(i).value();
      mailboxes.push_back(ranks_[i].host->mailbox_address());
      NameMailbox(machine.arena(), OffsetOf(machine, mailboxes.back()));
      blocks.push_back(SharedGroup::CreateBlock().value());
      members.push_back({i, blocks.back()->address()});
      NameBlock(machine.arena(), OffsetOf(machine, members.back().block));
    }
    const int64_t header = SharedGroup::FenceBytes(world_size);
    for (int i = 0; i < world_size; ++i) {
      machine.set_rank(i);
      Rank& rank = ranks_[i];
      FSDP_CHECK(rank.host->Connect(mailboxes).ok());
      rank.group = SharedGroup::Create(rank.host, std::move(blocks[i]), members,
                                       comm::RankNames(world_size), i)
                       .value();
      const int64_t bytes = header + options_.common_bytes;
      rank.common =
          i == 0 ? SharedSegment::Create(bytes).value()
                 : SharedSegment::Open(ranks_[0].common->address()).value();
      rank.fence = rank.group->MakeFence(rank.common);
      rank.data = rank.common->data() + header;
      rank.deadline = absl::Now() + absl::Hours(1);
    }
    const uint64_t common = OffsetOf(machine, ranks_[0].common->address());
    machine.arena().Name(common, header, "arrivals");
    machine.arena().Name(common + static_cast<uint64_t>(header),
                         options_.common_bytes, "common memory");
  }

  const RanksOptions options_;
  const std::vector<RankThread> threads_;
  std::vector<Rank> ranks_;
};

}  // namespace

std::unique_ptr<Scenario> MakeRanks(RanksOptions options,
                                    std::vector<RankThread> threads) {
  return std::make_unique<RanksScenario>(std::move(options),
                                         std::move(threads));
}

MakeScenario OnAllRanks(const RanksOptions& options,
                        const std::function<void(Rank&)>& body) {
  return [=] {
    std::vector<RankThread> threads;
    threads.reserve(options.world_size);
    for (int i = 0; i < options.world_size; ++i) threads.push_back({i, body});
    return MakeRanks(options, std::move(threads));
  };
}

void ExpectOk(const absl::Status& status, const Rank& rank, const char* what) {
  if (status.ok()) return;
  Violate(
      absl::StrCat("rank ", rank.rank, ", ", what, ": ", status.ToString()));
}

}  // namespace fsdp::interleavings
