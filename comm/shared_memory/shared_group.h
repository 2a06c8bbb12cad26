// One rank's end of a group of ranks that share memory. Orders calls, waits for
// them, and ends the group after a failure.
#ifndef COMM_SHARED_MEMORY_SHARED_GROUP_H_
#define COMM_SHARED_MEMORY_SHARED_GROUP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/host/shared_host.h"
#include "comm/host/shared_segment.h"
#include "comm/shared_memory/shared_operation.h"

namespace fsdp::comm {

struct SharedMember {
  int world_rank;  // on the host
  SegmentAddress block;
};

// The first failure (calls that differ, a missed deadline, Abort(), a rank that
// has left or died) ends the group: operations that are not done by then and
// all later calls fail with it, on every rank. Thread-safe.
class SharedGroup final : public std::enable_shared_from_this<SharedGroup> {
 public:
  class Operation;

  // Makes the block (SharedRankBlock) that this rank will have in a group.
  static absl::StatusOr<std::unique_ptr<SharedSegment>> CreateBlock();

  // `block` is this rank's, which the caller keeps until all ranks have made
  // the group; `members` and `names` are those of all ranks, by rank in it.
  static absl::StatusOr<std::shared_ptr<SharedGroup>> Create(
      std::shared_ptr<SharedHost> host,
      const std::shared_ptr<SharedSegment>& block,
      const std::vector<SharedMember>& members, RankNames names, int rank);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(peers_.size()); }
  const RankNames& names() const { return names_; }

  // Posts a call and returns. Blocks, until `deadline` at most, only if many
  // calls are posted that peers have not made yet.
  absl::StatusOr<std::shared_ptr<Operation>> Start(Call call,
                                                   CollectiveArgs buffers,
                                                   absl::Time deadline);

  // Returns the number of the operation among this group's calls, from 0.
  static int64_t NumberOf(const Operation& operation);

  // Blocks until the result is there, and with `inputs_free` also until no peer
  // reads this rank's input any more. Returns the errors of Work::Wait().
  absl::Status Wait(Operation& operation, bool inputs_free,
                    absl::Time deadline);

  // Makes a fence of this group. Its counters, zero at first, are in the first
  // FenceBytes() of `segment`.
  static int64_t FenceBytes(int world_size);
  std::unique_ptr<Fence> MakeFence(std::shared_ptr<SharedSegment> segment);

  void Abort(const absl::Status& reason);

  // Ends this rank's calls. Those that it has posted stay valid.
  void Leave();

  // Lets no other process join.
  void Seal();

 private:
  class SharedFence;
  struct Peer {
    int world_rank;
    std::shared_ptr<SharedSegment> segment;
    SharedRankBlock* block;
  };
  struct Failure {
    absl::Status status;  // of this rank's calls
    std::string text;     // for the others
    absl::StatusCode code_of_others;
  };
  struct Awaited {
    absl::FunctionRef<std::string()> name;
    absl::FunctionRef<bool()> is_done;
    absl::FunctionRef<bool(int peer)> is_missing;
  };

  SharedGroup(std::shared_ptr<SharedHost> host, std::vector<Peer> peers,
              RankNames names, int rank);

  absl::Status Await(const Awaited& awaited, absl::Time deadline);
  bool PassOrFail(const Awaited& awaited, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());

  // Moves all data that can be moved without waiting. Called with the host's
  // mutex held.
  void Progress();
  void Post(Operation& operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  void StageWhatFits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  void Finish(Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  bool Advance(Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  bool Match(Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  bool InputsLieInOneOutput(const Operation& operation) const;
  bool FindSources(Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  void FailToRead(Operation& operation, int peer, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  bool TakeNext(Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  bool TakeNextByParts(Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  std::vector<SharedSource> SourcesOf(const Operation& operation,
                                      int64_t chunk) const;

  bool AllHaveRead(uint64_t chunks) const;
  bool HasLeft(int peer) const;
  bool HasEnded(int peer) const;  // its process
  bool IsMissing(const Operation& operation, bool inputs_free, int peer) const;
  bool FailsWithPeers(const Awaited& awaited)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  bool EchoFailure() ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  void Fail(Failure failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  absl::Status Error(absl::string_view name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(host_->mutex());
  std::string LastSeen(int peer) const;
  std::string Gone(int peer) const;  // a peer that has left or ended
  void RingPeers();

  SharedRankBlock& own() { return *peers_[rank_].block; }
  const SharedRankBlock& own() const { return *peers_[rank_].block; }

  const std::shared_ptr<SharedHost> host_;
  const std::vector<Peer> peers_;
  const RankNames names_;
  const int rank_;

  uint64_t num_calls_ ABSL_GUARDED_BY(host_->mutex()) = 0;
  uint64_t num_chunks_ ABSL_GUARDED_BY(host_->mutex()) = 0;
  // Operations that this rank has not finished, in order.
  std::deque<std::shared_ptr<Operation>> queue_ ABSL_GUARDED_BY(host_->mutex());
  // Inputs that peers may still read in place, each with the number of chunks
  // after whose reading it is free.
  std::deque<std::pair<uint64_t, at::Tensor>> lent_
      ABSL_GUARDED_BY(host_->mutex());
  std::optional<Failure> failure_ ABSL_GUARDED_BY(host_->mutex());
  absl::Time next_check_of_processes_ ABSL_GUARDED_BY(host_->mutex());
};

}  // namespace fsdp::comm

#endif  // COMM_SHARED_MEMORY_SHARED_GROUP_H_
