// Collectives between the ranks of one group.
#ifndef COMM_COMMUNICATOR_H_
#define COMM_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/call.h"
#include "comm/rank_activity.h"
#include "comm/work.h"

namespace fsdp::comm {

// Returns a name such as "float32", or "unsupported" for a dtype that no
// collective takes.
absl::string_view DtypeName(at::ScalarType dtype);

// Memory that all ranks of a group share. What a rank writes is visible to
// another one once both have passed `fence`, or a collective that came after
// the write. Before a rank overwrites what others may be reading, it has to
// wait at `fence` until they have finished.
struct CommonMemory {
  at::Tensor memory;  // uint8, aligned to a page, zero at first
  std::unique_ptr<Fence> fence;
};

// The way in which a sum is written to the output.
struct ScaledSum {
  double scale = 1;         // factor of the sum
  bool accumulate = false;  // add to what the output holds
};

// One rank's end of a group. All ranks make the same calls in the same order. A
// backend that can see a mismatch fails it on every rank; with others it runs
// into the deadline. An object is used by one thread at a time; only Abort()
// and activity() may be called from any thread.
//
// Tensors are dense, contiguous and 1-D, on one device, of a dtype in
// {float32, float64, float16, bfloat16, int32, int64, uint8}. All ranks pass
// equal counts; flat_param::FlatLayout pads uneven shards. Buffers belong to
// the collective until its Work is done. `label` names what is moved
// ("blocks.3") in errors, traces and counts.
//
// Before anything is sent, the public methods check what a rank can check
// alone, and return InvalidArgument, or Unimplemented for a dtype or layout
// that is not listed here. Backends implement Do*().
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

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
  absl::StatusOr<std::unique_ptr<Work>> AllGather(const at::Tensor& out,
                                                  const at::Tensor& in,
                                                  absl::string_view label);

  // Sets out[i] to the `op` over all ranks q of in_q[rank * n + i], where
  // n = out.numel() and in.numel() == n * world_size. `out` may be this rank's
  // slice of `in`. `in` may be overwritten. The same inputs give the same bits
  // every time.
  absl::StatusOr<std::unique_ptr<Work>> ReduceScatter(const at::Tensor& out,
                                                      const at::Tensor& in,
                                                      ReduceOp op,
                                                      absl::string_view label);

  // Sets out[i] to scale * (the sum over all ranks q of in_q[rank * n + i]), or
  // adds that to out[i]. The sum is rounded to the dtype of `in` first. `out`
  // may have another floating-point dtype, and does not overlap `in`. Several
  // sums that are added to one `out` may run at the same time; they are added
  // in the order in which they are waited for.
  absl::StatusOr<std::unique_ptr<Work>> ReduceScatterScaled(
      const at::Tensor& out, const at::Tensor& in, ScaledSum sum,
      absl::string_view label);

  // Sets out[r * n + i] = in_r[rank * n + i], where n = in.numel() / world_size
  // without a remainder. Both have the same size and do not overlap. Without
  // HasAllToAll() all ranks return Unimplemented at once.
  absl::StatusOr<std::unique_ptr<Work>> AllToAll(const at::Tensor& out,
                                                 const at::Tensor& in,
                                                 absl::string_view label);

  // Reduces `tensor` over all ranks, in place. All ranks get the same bits.
  absl::StatusOr<std::unique_ptr<Work>> AllReduce(const at::Tensor& tensor,
                                                  ReduceOp op,
                                                  absl::string_view label);

  // Copies the tensor of rank `root` to all.
  absl::StatusOr<std::unique_ptr<Work>> Broadcast(const at::Tensor& tensor,
                                                  int root,
                                                  absl::string_view label);

  // Returns the group of the ranks that pass the same `color` >= 0, ordered by
  // `key`, then by rank. Collective over this group, which stays usable.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                              int key) = 0;

  // Makes pending and later operations of this rank fail with Aborted and
  // `reason`. Tells the peers as far as the backend can, so that nobody waits
  // for this rank. Never blocks long and never fails. Only the first call has
  // an effect.
  virtual void Abort(const absl::Status& reason) = 0;

 protected:
  // AllocateSymmetric() for backends to which all memory is the same.
  static absl::StatusOr<at::Tensor> AllocatePlain(int64_t bytes);

  // These do what the public methods say. Their arguments have been checked.
  virtual absl::StatusOr<std::unique_ptr<Work>> DoAllGather(
      const at::Tensor& out, const at::Tensor& in, absl::string_view label) = 0;
  virtual absl::StatusOr<std::unique_ptr<Work>> DoReduceScatter(
      const at::Tensor& out, const at::Tensor& in, ReduceOp op,
      absl::string_view label) = 0;
  // By default sums in place with DoReduceScatter() and scales in Wait().
  virtual absl::StatusOr<std::unique_ptr<Work>> DoReduceScatterScaled(
      const at::Tensor& out, const at::Tensor& in, ScaledSum sum,
      absl::string_view label);
  // Called only if HasAllToAll().
  virtual absl::StatusOr<std::unique_ptr<Work>> DoAllToAll(
      const at::Tensor& out, const at::Tensor& in, absl::string_view label) = 0;
  virtual absl::StatusOr<std::unique_ptr<Work>> DoAllReduce(
      const at::Tensor& tensor, ReduceOp op, absl::string_view label) = 0;
  virtual absl::StatusOr<std::unique_ptr<Work>> DoBroadcast(
      const at::Tensor& tensor, int root, absl::string_view label) = 0;
};

}  // namespace fsdp::comm

namespace c10d {
class Store;
}

namespace fsdp::comm {

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
    std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
        const DeviceMeeting& meeting)>;

}  // namespace fsdp::comm

#endif  // COMM_COMMUNICATOR_H_
