// Collectives between the ranks of one group.
#ifndef COMM_COMMUNICATOR_H_
#define COMM_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/rank_activity.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// The kinds of calls that all ranks of a group make together.
enum class Collective {
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllReduce,
  kBroadcast,
  kSplit,
};

// Returns a name such as "all-gather".
absl::string_view CollectiveName(Collective collective);

// Selects what a reduction makes of the ranks' elements, each by itself.
enum class ReduceOp { kSum, kMin, kMax };

// Returns "sum", "min" or "max".
absl::string_view ReduceOpName(ReduceOp op);

// One rank's call of a collective, as ranks compare it and errors name it.
struct Call {
  Collective collective = Collective::kAllGather;  // the kind of the call
  std::string label;                               // "blocks.2"
  std::string dtype;   // "float32"; empty where no tensor is involved
  int64_t count = 0;   // elements of one rank's shard, or of the whole tensor
  std::string detail;  // "sum", "root 2"; empty where there is nothing to say
};

bool operator==(const Call& a, const Call& b);
inline bool operator!=(const Call& a, const Call& b) { return !(a == b); }

// Returns the call of a collective whose ranks share the dtype and the count of
// `counted`.
Call CallOf(Collective collective, absl::string_view label,
            const at::Tensor& counted, absl::string_view detail = "");

// For people: "all-gather of blocks.2 (float32 x 1024)".
std::string ToString(const Call& call);

// Returns "all-gather #17 of blocks.2"; `sequence` counts a group's calls from
// 0.
std::string Name(const Call& call, int64_t sequence);

// The names that texts give to the ranks of a group. Whoever reads an error has
// to find the process: where the group is a part of the world, a name has the
// rank in the world, too. Cheap to copy.
class RankNames {
 public:
  RankNames() : RankNames(1) {}

  // Names the ranks of a world of `size` > 0 ranks.
  explicit RankNames(int size);

  // Names the ranks of a group. `world_ranks` has the rank in the world of each
  // of them, or kNobodyKnows; empty, it says that the group is the world.
  // InvalidArgument: it has another size than `size`.
  static absl::StatusOr<RankNames> Of(int size, std::vector<int> world_ranks);
  static constexpr int kNobodyKnows = -1;  // in place of a rank in the world

  // Names a group of `members` of this group, in their order. The names stay
  // the same if these are all its ranks in its own order.
  RankNames Part(absl::Span<const int> members) const;

  int size() const { return size_; }  // how many ranks the group has
  // Returns the rank in the world, or kNobodyKnows.
  int world_rank(int rank) const;

  // These return "rank 1", "rank 1 of 4" and "ranks 1, 3", in a part of the
  // world followed by " (world rank 5)" or " (world ranks 5, 7)".
  std::string Name(int rank) const;
  std::string Place(int rank) const;
  std::string List(absl::Span<const int> ranks) const;
  // Returns "rank 5", or in a part of the world "world rank 5". The rank need
  // not be in the group.
  std::string NameInWorld(int world_rank) const;

 private:
  RankNames(int size, std::shared_ptr<const std::vector<int>> world_ranks);

  std::string Suffix(int rank) const;  // " (world rank 5)", or empty

  int size_;
  std::shared_ptr<const std::vector<int>> world_ranks_;  // null: the world
};

// One collective that a rank has started. It is used by one thread at a time
// and keeps its tensors alive until it is done. It may be destroyed without any
// wait: the operation still takes its place in the order of collectives. The
// memory that an all-gather or an all-to-all only reads may then be written,
// which makes its outputs undefined, here and on the other ranks. All other
// memory, outputs included, stays the operation's until a later operation of
// the group is done.
class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  // Blocks the host until the operation is done. Its buffers may then be read
  // and written. After an error the communicator is aborted and the outputs are
  // undefined:
  //   DeadlineExceeded  it was not done at `deadline`; the message names the
  //                     operation, its label, this rank and, where they are
  //                     known, the missing ranks
  //   Unavailable       a peer is gone
  //   InvalidArgument   the ranks' calls did not match
  //   Aborted           this rank or a peer called Abort(); has its reason
  // A second call returns what the first one returned.
  virtual absl::Status Wait(absl::Time deadline) = 0;

  // Waits for the outputs alone. Where ranks read each other's memory, peers
  // may still read the inputs then: write those only after Wait().
  virtual absl::Status WaitForResult(absl::Time deadline) {
    return Wait(deadline);
  }

  // Makes the current stream of the tensors' device wait for the operation,
  // without blocking the host where the device allows it. For tensors on the
  // CPU it is Wait(now + default_timeout()).
  virtual absl::Status BlockCurrentStream() = 0;

  // The number by which errors name the operation: 17 in "all-gather #17 of
  // blocks.2". It is -1 if errors name it by no number, or by how many calls of
  // the group came before it.
  virtual int64_t number() const { return -1; }
};

// A collective, or why it could not be started.
using StartedWork = absl::StatusOr<std::unique_ptr<Work>>;

// One rank's end of a point that all ranks of a group have to reach, outside
// the order of collectives. Used by one thread at a time.
class Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence() = default;

  // This rank has reached the point once more; its reads and writes before it
  // are done. Never blocks.
  virtual void Arrive() = 0;

  // Blocks until every rank has arrived as many times as this one. What they
  // wrote before is then visible. Returns the errors of Work::Wait(), after
  // which the group is aborted; DeadlineExceeded names the missing ranks.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

// Returns a name such as "float32", or "unsupported" for a dtype that no
// collective takes.
absl::string_view DtypeName(at::ScalarType dtype);

// Memory that all ranks of a group share. What a rank writes is visible to
// another one once both have passed `fence`, or a collective that came after
// the write. Before a rank overwrites what others may be reading, it has to
// wait at `fence` until they have finished.
struct CommonMemory {
  at::Tensor memory;             // uint8, aligned to a page, zero at first
  std::unique_ptr<Fence> fence;  // of the same ranks
};

// The way in which a sum is written to the output.
struct ScaledSum {
  double scale = 1;         // factor of the sum
  bool accumulate = false;  // add to what the output holds
};

// The arguments of a collective of Communicator.
struct CollectiveArgs {
  Collective collective;         // what is started
  at::Tensor out;                // an all-reduce or a broadcast has only this
  at::Tensor in = {};            // what this rank gives
  ReduceOp op = ReduceOp::kSum;  // of a reduce-scatter or an all-reduce
  int root = 0;                  // of a broadcast
  std::optional<ScaledSum> scaled = {};  // of ReduceScatterScaled()

  // The tensor that has the data of all ranks.
  const at::Tensor& whole() const;
  // The tensor whose dtype and count all ranks share.
  const at::Tensor& counted() const;
  // Returns the Call::detail.
  std::string detail() const;
};

class Communicator;
// A communicator, or why there is none.
using CreatedCommunicator = absl::StatusOr<std::unique_ptr<Communicator>>;

// One rank's end of a group. All ranks make the same calls in the same order. A
// backend that can see a mismatch fails it on every rank; with others it runs
// into the deadline. An object is used by one thread at a time; only Abort()
// and activity() may be called from any thread.
//
// Tensors are dense, contiguous and 1-D, on one device, of a dtype in
// {float32, float64, float16, bfloat16, int32, int64, uint8}. All ranks pass
// equal counts; flat_param::FlatLayout pads uneven shards. Buffers belong to
// the collective until its Work is done, or as Work says if it is destroyed
// before. `label` names what is moved ("blocks.3") in errors, traces and
// counts.
//
// Before anything is sent, the public methods check what a rank can check
// alone, and return InvalidArgument, or Unimplemented for a dtype or layout
// that is not listed here. Backends implement DoCollective().
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;        // this one's: 0 <= rank < world_size
  virtual int world_size() const = 0;  // how many ranks the group has

  // The names that errors give to the ranks.
  virtual const RankNames& names() const = 0;

  // Returns "rank 1 of 4", or "rank 1 of 4 (world rank 5)" in a part of the
  // world.
  std::string Place() const { return names().Place(rank()); }

  // The limit of a wait whose caller has no deadline of its own.
  virtual absl::Duration default_timeout() const = 0;

  // For people: "gloo, rank 1 of 4".
  virtual std::string ToString() const = 0;

  // True where a sum is faster if the caller scales the inputs, because
  // ReduceScatterScaled() needs another pass over the result. All ranks return
  // the same.
  virtual bool PrefersScaledInputs() const { return false; }

  // True where operations on the group's device may be started while the
  // current stream is captured into a CUDA graph. They become part of the graph
  // and run with each launch of it. Each Work needs a BlockCurrentStream() in
  // the same capture; AllocateSymmetric() and Split() have to come before it.
  // Nothing watches these operations: whoever waits for the graph needs a
  // deadline, and calls Abort() once it has passed.
  virtual bool CanBeCaptured() const { return false; }

  // True where AllToAll() is implemented. All ranks return the same.
  virtual bool HasAllToAll() const { return true; }

  // True where AllocateCommon() is implemented. All ranks return the same. A
  // group that Split() makes may have common memory where this one has none.
  virtual bool HasCommonMemory() const { return false; }

  // This rank notes here what it does, for whoever looks at a job that hangs.
  // Null where nobody reads it. May be called from any thread.
  virtual std::shared_ptr<RankActivity> activity() const { return nullptr; }

  // Returns `bytes` >= 0 of uninitialised memory (uint8, 64-byte aligned) that
  // the backend moves fastest, or plain memory where it has nothing better.
  // Collective: all ranks call it in the same order, with the same size. It may
  // make the host wait for all ranks, so do not call it in a step.
  virtual absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) = 0;

  // Returns `bytes` >= 0 that all ranks share. Collective; blocks up to
  // default_timeout(). Without HasCommonMemory() all ranks return Unimplemented
  // at once.
  virtual absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes);

  // Sets out[r * n + i] = in_r[i] for each rank r, where n = in.numel() and
  // out.numel() == n * world_size. `in` may be this rank's slice of `out`; any
  // other overlap is an error. If `out` is common memory, at the same place on
  // all ranks, and `in` is this rank's slice of it, nothing has to move.
  StartedWork AllGather(const at::Tensor& out, const at::Tensor& in,
                        absl::string_view label);

  // Sets out[i] to the `op` over all ranks q of in_q[rank * n + i], where
  // n = out.numel() and in.numel() == n * world_size. `out` may be this rank's
  // slice of `in`. `in` may be overwritten. The same inputs give the same bits
  // every time.
  StartedWork ReduceScatter(const at::Tensor& out, const at::Tensor& in,
                            ReduceOp op, absl::string_view label);

  // Sets out[i] to scale * (the sum over all ranks q of in_q[rank * n + i]), or
  // adds that to out[i]. The sum is rounded to the dtype of `in` first. `out`
  // may have another floating-point dtype, and does not overlap `in`. Several
  // sums that are added to one `out` may run at the same time; they are added
  // in the order in which they are waited for. Meanwhile `out` has those that
  // were waited for and maybe later ones, so what they left can be read.
  StartedWork ReduceScatterScaled(const at::Tensor& out, const at::Tensor& in,
                                  ScaledSum sum, absl::string_view label);

  // Sets out[r * n + i] = in_r[rank * n + i], where n = in.numel() / world_size
  // without a remainder. Both have the same size and do not overlap. Without
  // HasAllToAll() all ranks return Unimplemented at once.
  StartedWork AllToAll(const at::Tensor& out, const at::Tensor& in,
                       absl::string_view label);

  // Reduces `tensor` over all ranks, in place. All ranks get the same bits.
  StartedWork AllReduce(const at::Tensor& tensor, ReduceOp op,
                        absl::string_view label);

  // Copies the tensor of rank `root` to all.
  StartedWork Broadcast(const at::Tensor& tensor, int root,
                        absl::string_view label);

  // Does what the method of `args.collective` does.
  StartedWork StartCollective(const CollectiveArgs& args,
                              absl::string_view label);

  // Returns the group of the ranks that pass the same `color` >= 0, ordered by
  // `key`, then by rank. Collective over this group, which stays usable.
  virtual CreatedCommunicator Split(int color, int key) = 0;

  // Makes pending and later operations of this rank fail with Aborted and
  // `reason`. Tells the peers as far as the backend can, so that nobody waits
  // for this rank. Never blocks long and never fails. Only the first call has
  // an effect.
  virtual void Abort(const absl::Status& reason) = 0;

 protected:
  // AllocateSymmetric() for backends to which all memory of `device` is the
  // same.
  static absl::StatusOr<at::Tensor> AllocatePlain(
      int64_t bytes, c10::Device device = c10::Device(c10::DeviceType::CPU));

  // Returns InvalidArgument for a color that Split() does not take.
  absl::Status CheckColor(int color) const;

  // Starts a collective whose arguments have been checked. An all-to-all comes
  // only if HasAllToAll(), a split never.
  virtual StartedWork DoCollective(const CollectiveArgs& args,
                                   absl::string_view label) = 0;
  // Does the same with `args.scaled`. By default sums in place with
  // DoCollective() and scales in Wait().
  virtual StartedWork DoScaledSum(const CollectiveArgs& args,
                                  absl::string_view label);

  // True in a destructor that an exception calls. The rank has not left its
  // group then: it has failed, and causes the errors of its peers.
  bool unwinds() const {
    return std::uncaught_exceptions() > exceptions_before_;
  }
  // The reason with which such a communicator is aborted.
  static absl::Status EndedByException();

 private:
  const int exceptions_before_ = std::uncaught_exceptions();
};

// The arguments with which one rank connects the backend for a device's
// tensors.
struct DeviceMeeting {
  c10::intrusive_ptr<c10d::Store> store;  // no other backend uses its keys
  int local_rank = 0;                     // among the ranks of this host
  absl::Duration timeout;  // Communicator::default_timeout() of the backend
  Communicator& host;      // connects the same ranks on the CPU; may be split
};

// Connects one rank, in the thread of the caller. Blocks until all ranks have
// connected.
using ConnectDevice =
    std::function<CreatedCommunicator(const DeviceMeeting& meeting)>;

}  // namespace fsdp::comm

#endif  // COMM_COMMUNICATOR_H_
