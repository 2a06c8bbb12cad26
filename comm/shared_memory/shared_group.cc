#include "comm/shared_memory/shared_group.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

// The longest time between the loss of a process's memory and its end.
constexpr absl::Duration kTimeToDie = absl::Seconds(2);

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

}  // namespace

// The members are guarded by the host's mutex.
class SharedGroup::Operation {
 public:
  Operation(Call call, SharedOperation work)
      : call(std::move(call)), work(std::move(work)) {}

  uint64_t end_chunk() const { return first_chunk + work.num_chunks(); }
  bool reads_in_place() const {
    return std::any_of(sources.begin(), sources.end(), [](const auto& source) {
      return source.data != nullptr;
    });
  }
  std::string name() const {
    return Name(call, static_cast<int64_t>(sequence));
  }

  const Call call;
  const SharedOperation work;
  uint64_t sequence = 0;
  uint64_t first_chunk = 0;
  SharedPlace in;  // where peers read; nowhere: staged

  bool matched = false;
  bool in_common = false;         // nothing moves: all ranks look at one memory
  int64_t num_staged = 0;         // chunks, by this rank
  int64_t num_taken = 0;          // chunks, by this rank
  bool own_part_reduced = false;  // of the chunk that comes next
  std::vector<SharedHeap::Mapping> sources;  // by rank; null: staged
  absl::Time unreadable_since = absl::InfiniteFuture();  // a peer's memory
  bool done = false;
};

absl::StatusOr<std::unique_ptr<SharedSegment>> SharedGroup::CreateBlock() {
  return SharedSegment::Create(sizeof(SharedRankBlock));
}

absl::StatusOr<std::shared_ptr<SharedGroup>> SharedGroup::Create(
    std::shared_ptr<SharedHost> host,
    const std::shared_ptr<SharedSegment>& block,
    const std::vector<SharedMember>& members, RankNames names, int rank) {
  FSDP_CHECK(names.size() == static_cast<int>(members.size()));
  std::vector<Peer> peers;
  for (size_t i = 0; i < members.size(); ++i) {
    std::shared_ptr<SharedSegment> segment = block;
    if (static_cast<int>(i) != rank) {
      FSDP_ASSIGN_OR_RETURN(segment, SharedSegment::Open(members[i].block));
      segment->Seal();
    }
    if (segment->bytes() < static_cast<int64_t>(sizeof(SharedRankBlock))) {
      return absl::UnavailableError(absl::StrCat(
          names.Name(static_cast<int>(i)), " has a block of ", segment->bytes(),
          " bytes: another program, or another build of this"));
    }
    auto* shown = reinterpret_cast<SharedRankBlock*>(segment->data());
    peers.push_back({members[i].world_rank, std::move(segment), shown});
  }
  std::shared_ptr<SharedGroup> group(new SharedGroup(
      std::move(host), std::move(peers), std::move(names), rank));
  absl::MutexLock lock(&group->host_->mutex());
  group->host_->Add([weak = std::weak_ptr<SharedGroup>(group)] {
    const auto strong = weak.lock();
    if (strong != nullptr) strong->Progress();
    return strong != nullptr;
  });
  return group;
}

SharedGroup::SharedGroup(std::shared_ptr<SharedHost> host,
                         std::vector<Peer> peers, RankNames names, int rank)
    : host_(std::move(host)),
      peers_(std::move(peers)),
      names_(std::move(names)),
      rank_(rank) {
  FSDP_CHECK(rank >= 0 && rank < world_size());
}

absl::StatusOr<std::shared_ptr<SharedGroup::Operation>> SharedGroup::Start(
    Call call, CollectiveArgs buffers, absl::Time deadline) {
  auto operation = std::make_shared<Operation>(
      std::move(call), SharedOperation(std::move(buffers), rank_, world_size(),
                                       SharedRankBlock::kSlotBytes));
  uint64_t oldest = 0;  // call that must be finished by all
  {
    absl::MutexLock lock(&host_->mutex());
    operation->sequence = num_calls_;
    if (failure_ || EchoFailure()) return Error(operation->name());
    if (num_calls_ >= SharedRankBlock::kCalls) {
      oldest = num_calls_ - SharedRankBlock::kCalls + 1;
    }
  }
  const auto is_behind = [&](int peer) {
    return peers_[peer].block->finished.load(kAcquire) < oldest;
  };
  const auto has_room = [&] {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (is_behind(peer)) return false;
    }
    return true;
  };
  if (!has_room()) {
    const auto name = [&] { return operation->name(); };
    FSDP_RETURN_IF_ERROR(Await({name, has_room, is_behind}, deadline));
  }
  absl::MutexLock lock(&host_->mutex());
  if (failure_) return Error(operation->name());
  Post(*operation);
  queue_.push_back(operation);
  Progress();
  return operation;
}

int64_t SharedGroup::NumberOf(const Operation& operation) {
  return static_cast<int64_t>(operation.sequence);
}

void SharedGroup::Post(Operation& operation) {
  operation.sequence = num_calls_++;
  operation.first_chunk = num_chunks_;
  num_chunks_ += operation.work.num_chunks();
  const CollectiveArgs& buffers = operation.work.buffers();
  PostedCall& posted =
      own().calls[operation.sequence % SharedRankBlock::kCalls];
  posted.call = ImageOf(operation.call);
  posted.in = SharedPlace();
  posted.out = SharedPlace();
  if (operation.work.input_may_be_read_in_place()) {
    posted.in = host_->heap()->Find(buffers.in.const_data_ptr(),
                                    static_cast<int64_t>(buffers.in.nbytes()));
  }
  if (buffers.collective == Collective::kAllGather && posted.in.exists()) {
    posted.out =
        host_->heap()->Find(buffers.out.const_data_ptr(),
                            static_cast<int64_t>(buffers.out.nbytes()));
  }
  operation.in = posted.in;
  own().arrived.store(num_calls_, kRelease);
}

// Stages in the order of the calls, in which chunks are numbered.
void SharedGroup::StageWhatFits() {
  for (const std::shared_ptr<Operation>& operation : queue_) {
    const SharedOperation& work = operation->work;
    const bool nothing_to_stage =
        operation->in.exists() || world_size() == 1 ||
        (work.only_root_has_input() && work.buffers().root != rank_);
    if (nothing_to_stage) operation->num_staged = work.num_chunks();
    while (operation->num_staged < work.num_chunks()) {
      const uint64_t chunk = operation->first_chunk + operation->num_staged;
      for (const Peer& peer : peers_) {
        const uint64_t read = peer.block->read.load(kAcquire);
        if (read + SharedRankBlock::kSlots <= chunk) return;
      }
      work.Stage(operation->num_staged,
                 own().slots[chunk % SharedRankBlock::kSlots]);
      ++operation->num_staged;
      own().staged.store(chunk + 1, kRelease);
      RingPeers();
    }
    if (own().staged.load(kAcquire) < operation->end_chunk()) {
      own().staged.store(operation->end_chunk(), kRelease);
      RingPeers();
    }
  }
}

void SharedGroup::Progress() {
  host_->mutex().AssertHeld();
  if (failure_) return;
  StageWhatFits();
  while (!queue_.empty()) {
    const std::shared_ptr<Operation> operation = queue_.front();
    if (!Advance(*operation)) return;
    // A rank that has failed may have overwritten what was read in place. The
    // bells that it rang before, and this rank after, keep these in order.
    if (operation->reads_in_place() && EchoFailure()) return;
    queue_.pop_front();
    Finish(*operation);
  }
  while (!lent_.empty() && AllHaveRead(lent_.front().first)) lent_.pop_front();
}

void SharedGroup::Finish(Operation& operation) {
  operation.done = true;
  operation.sources.clear();
  if (operation.in.exists()) {
    lent_.emplace_back(operation.end_chunk(), operation.work.input());
  }
  own().finished.store(operation.sequence + 1, kRelease);
  RingPeers();
}

bool SharedGroup::AllHaveRead(uint64_t chunks) const {
  for (const Peer& peer : peers_) {
    if (peer.block->read.load(kAcquire) < chunks) return false;
  }
  return true;
}

// Returns whether the operation is done; false also if it has failed.
bool SharedGroup::Advance(Operation& operation) {
  if (!operation.matched && !Match(operation)) return false;
  while (operation.num_taken < operation.work.num_chunks()) {
    const bool taken = operation.work.reduces_by_parts()
                           ? TakeNextByParts(operation)
                           : TakeNext(operation);
    if (!taken) return false;
    operation.own_part_reduced = false;
    own().read.store(operation.first_chunk + operation.num_taken, kRelease);
    RingPeers();
    StageWhatFits();
  }
  return operation.num_staged == operation.work.num_chunks();
}

bool SharedGroup::Match(Operation& operation) {
  for (const Peer& peer : peers_) {
    if (peer.block->arrived.load(kAcquire) <= operation.sequence) return false;
  }
  const size_t index = operation.sequence % SharedRankBlock::kCalls;
  const CallImage& own_call = own().calls[index].call;
  for (const Peer& other : peers_) {
    if (other.block->calls[index].call == own_call) continue;
    std::vector<std::string> calls;
    calls.reserve(world_size());
    for (int peer = 0; peer < world_size(); ++peer) {
      calls.push_back(absl::StrCat(
          names_.Name(peer), " called ",
          comm::ToString(CallOf(peers_[peer].block->calls[index].call))));
    }
    const std::string text =
        absl::StrCat("the ranks' calls #", operation.sequence,
                     " differ: ", absl::StrJoin(calls, "; "));
    Fail({absl::InvalidArgumentError(text), text,
          absl::StatusCode::kInvalidArgument});
    return false;
  }
  if (!FindSources(operation)) return false;
  operation.matched = true;
  return true;
}

// Returns whether every rank's input is where it belongs in an output that is
// one memory for all ranks.
bool SharedGroup::InputsLieInOneOutput(const Operation& operation) const {
  const size_t index = operation.sequence % SharedRankBlock::kCalls;
  const SharedPlace& own_out = own().calls[index].out;
  if (!own_out.exists()) return false;
  const auto part_bytes = static_cast<int64_t>(operation.work.input().nbytes());
  for (int peer = 0; peer < world_size(); ++peer) {
    const PostedCall& posted = peers_[peer].block->calls[index];
    SharedPlace part = own_out;
    part.offset += peer * part_bytes;
    if (!(posted.out == own_out) || !(posted.in == part)) return false;
  }
  return true;
}

// Maps the inputs that the peers have not staged.
bool SharedGroup::FindSources(Operation& operation) {
  const size_t index = operation.sequence % SharedRankBlock::kCalls;
  operation.in_common = InputsLieInOneOutput(operation);
  operation.sources.resize(peers_.size());
  if (operation.in_common) return true;
  for (int peer = 0; peer < world_size(); ++peer) {
    const PostedCall& posted = peers_[peer].block->calls[index];
    if (peer == rank_ || !posted.in.exists()) continue;
    absl::StatusOr<SharedHeap::Mapping> mapping = host_->heap()->Resolve(
        peers_[peer].world_rank, posted.in,
        static_cast<int64_t>(operation.work.input().nbytes()));
    if (!mapping.ok()) {
      FailToRead(operation, peer, mapping.status());
      return false;
    }
    operation.sources[peer] = *std::move(mapping);
  }
  return true;
}

// Fails the group unless a cause may still turn up: a dying rank loses its
// memory before its end can be seen, and one that gives up says why.
void SharedGroup::FailToRead(Operation& operation, int peer,
                             const absl::Status& status) {
  if (EchoFailure()) return;
  const absl::Time now = absl::Now();
  if (operation.unreadable_since == absl::InfiniteFuture()) {
    operation.unreadable_since = now;
  }
  std::string text;
  if (HasLeft(peer) || HasEnded(peer)) {
    text = Gone(peer);
  } else if (now - operation.unreadable_since > kTimeToDie) {
    text = absl::StrCat(names_.Name(rank_), " cannot read the memory of ",
                        names_.Name(peer), ": ", status.message());
  } else {
    return;  // the waiter tries again
  }
  Fail({absl::UnavailableError(text), text, absl::StatusCode::kUnavailable});
}

std::vector<SharedSource> SharedGroup::SourcesOf(const Operation& operation,
                                                 int64_t chunk) const {
  const uint64_t slot =
      (operation.first_chunk + chunk) % SharedRankBlock::kSlots;
  std::vector<SharedSource> sources(peers_.size());
  for (int peer = 0; peer < world_size(); ++peer) {
    const char* mapped = operation.sources[peer].data;
    if (peer == rank_) {
      const at::Tensor& input = operation.work.input();
      sources[peer] = {static_cast<const char*>(input.const_data_ptr()), false};
    } else if (mapped != nullptr) {
      sources[peer] = {mapped, false};
    } else {
      sources[peer] = {peers_[peer].block->slots[slot], true};
    }
  }
  return sources;
}

// Takes as many chunks at once as are there and lie in one piece.
bool SharedGroup::TakeNext(Operation& operation) {
  uint64_t staged = operation.end_chunk();
  bool any_slots = false;
  for (int peer = 0; peer < world_size(); ++peer) {
    // This rank counts, too: what it takes may replace what it has to stage.
    staged = std::min(staged, peers_[peer].block->staged.load(kAcquire));
    if (peer == rank_) continue;
    any_slots = any_slots || operation.sources[peer].data == nullptr;
  }
  const int64_t begin = operation.num_taken;
  if (staged <= operation.first_chunk + begin) return false;
  auto end = static_cast<int64_t>(staged - operation.first_chunk);
  if (!operation.in_common) {
    if (any_slots) end = begin + 1;
    operation.work.Take(begin, end, SourcesOf(operation, begin));
  }
  operation.num_taken = end;
  return true;
}

bool SharedGroup::TakeNextByParts(Operation& operation) {
  const uint64_t chunk = operation.first_chunk + operation.num_taken;
  const auto all_passed = [&](auto counter) {
    for (const Peer& peer : peers_) {
      if ((peer.block->*counter).load(kAcquire) <= chunk) return false;
    }
    return true;
  };
  if (!operation.own_part_reduced) {
    if (!all_passed(&SharedRankBlock::staged)) return false;
    operation.work.ReducePart(operation.num_taken,
                              SourcesOf(operation, operation.num_taken),
                              own().slots[chunk % SharedRankBlock::kSlots]);
    operation.own_part_reduced = true;
    own().reduced.store(chunk + 1, kRelease);
    RingPeers();
  }
  if (!all_passed(&SharedRankBlock::reduced)) return false;
  std::vector<SharedSource> slots(peers_.size());
  for (int peer = 0; peer < world_size(); ++peer) {
    const SharedRankBlock& block = *peers_[peer].block;
    slots[peer] = {block.slots[chunk % SharedRankBlock::kSlots], true};
  }
  operation.work.TakeParts(operation.num_taken, slots);
  ++operation.num_taken;
  return true;
}

absl::Status SharedGroup::Wait(Operation& operation, bool inputs_free,
                               absl::Time deadline) {
  bool done = false;
  {
    absl::MutexLock lock(&host_->mutex());
    done = operation.done;
  }
  // Otherwise peers read a staged copy, or what nobody may write anyhow.
  const bool peers_read_input = operation.in.exists();
  const auto is_missing = [&](int peer) {
    return IsMissing(operation, inputs_free, peer);
  };
  const auto is_done = [&] {
    host_->mutex().AssertHeld();
    if (!operation.done) return false;
    return !inputs_free || !peers_read_input || operation.in_common ||
           AllHaveRead(operation.end_chunk());
  };
  if (done && !inputs_free) return absl::OkStatus();
  const auto name = [&] { return operation.name(); };
  return Await({name, is_done, is_missing}, deadline);
}

// Returns whether `peer` is behind those who are the furthest.
bool SharedGroup::IsMissing(const Operation& operation, bool inputs_free,
                            int peer) const {
  const SharedRankBlock& block = *peers_[peer].block;
  bool all_arrived = true;
  for (const Peer& other : peers_) {
    all_arrived =
        all_arrived && other.block->arrived.load(kAcquire) > operation.sequence;
  }
  if (!all_arrived) return block.arrived.load(kAcquire) <= operation.sequence;
  if (block.staged.load(kAcquire) < operation.end_chunk()) return true;
  return (inputs_free || operation.work.reduces_by_parts()) &&
         block.read.load(kAcquire) < operation.end_chunk();
}

}  // namespace fsdp::comm
