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

// "float32"; "unsupported" for a dtype that no collective takes.
absl::string_view DtypeName(at::ScalarType dtype);

// Memory that is the same on all ranks of a group, not one's own on each. What
// a rank writes, others see once both have passed `fence` or a collective that
// came after the write. A rank that overwrites what others may be reading has
// to see to it, by `fence`, that they have finished.
struct CommonMemory {
  at::Tensor memory;  // uint8, aligned to a page, zero at first
  std::unique_ptr<Fence> fence;
};

// What a sum becomes on its way to the output.
struct ScaledSum {
  double scale = 1;
  bool accumulate = false;  // added to what the output holds
};

// One rank's end of a group. All ranks make the same calls in the same order;
// a backend that can see a mismatch fails it on every rank, others run into
// the deadline. Every rank uses its own object from one thread at a time;
// only Abort() may be called from any thread.
//
// Tensors are dense, contiguous and 1-D, on one device, of a dtype in
// {float32, float64, float16, bfloat16, int32, int64, uint8}; all ranks pass
// equal counts. Uneven shards are the business of flat_param::FlatLayout.
// Buffers belong to the collective until its Work is done. `label` names what
// is being moved ("blocks.3") in errors, traces and counts.
//
// The public methods check the arguments that can be checked locally and
// return InvalidArgument, or Unimplemented for a dtype or layout outside the
// list, before anything is sent; backends implement Do*().
class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // What errors call the ranks.
  virtual const RankNames& names() const = 0;

  // "rank 1 of 4", or "rank 1 of 4 (world rank 5)" of a part.
  std::string Place() const { return names().Place(rank()); }

  // How long a wait may take where the caller has no deadline of its own.
  virtual absl::Duration default_timeout() const = 0;

  // "gloo, rank 1 of 4".
  virtual std::string ToString() const = 0;

  // Whether a sum takes less when the caller has scaled the inputs than when
  // ReduceScatterScaled() scales it, which costs a pass over the result here.
  // The same on all ranks.
  virtual bool PrefersScaledInputs() const { return false; }

  // Whether operations on the group's device may be started while the current
  // stream is being captured into a CUDA graph. They become part of the graph
  // and run with each launch of it. Nobody watches them: whoever waits for the
  // graph needs a deadline, and calls Abort() when it has passed. Their Works
  // end with BlockCurrentStream() in the same capture. AllocateSymmetric() and
  // Split() come before.
  virtual bool CanBeCaptured() const { return false; }

  // Whether there is an AllToAll(). The same on all ranks.
  virtual bool HasAllToAll() const { return true; }

  // Whether ranks have memory in common, so that there is an AllocateCommon().
  // The same on all ranks; a part that Split() makes may have some where the
  // whole has none.
  virtual bool HasCommonMemory() const { return false; }

  // Where this rank notes what it does, for whoever looks at a job that hangs;
  // null: nobody does. May be called from any thread.
  virtual std::shared_ptr<RankActivity> activity() const { return nullptr; }

  // `bytes` >= 0 of uninitialised memory (uint8, 64-byte aligned) that the
  // group's backend can reach best; plain memory where a backend has nothing
  // better. A collective call: same order and size on all ranks. It may make
  // the host wait for all of them, so it has no place in a step.
  virtual absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) = 0;

  // `bytes` >= 0 that all ranks have in common. Unimplemented, on all ranks
  // alike and at once, unless HasCommonMemory(). A collective call that blocks
  // up to default_timeout().
  virtual absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes);

  // out[r * n + i] = in_r[i], n = in.numel(); out.numel() == n * world_size.
  // `in` may be this rank's own slice of `out` and may not overlap it
  // otherwise. `out` may be common memory, at the same place on all ranks, and
  // `in` this rank's slice of it: then nothing needs to move.
  absl::StatusOr<std::unique_ptr<Work>> AllGather(const at::Tensor& out,
                                                  const at::Tensor& in,
                                                  absl::string_view label);

  // out[i] = op over ranks q of in_q[rank * n + i], n = out.numel();
  // in.numel() == n * world_size. `out` may be this rank's own slice of `in`.
  // `in` may be overwritten. The same inputs give the same bits every time.
  absl::StatusOr<std::unique_ptr<Work>> ReduceScatter(const at::Tensor& out,
                                                      const at::Tensor& in,
                                                      ReduceOp op,
                                                      absl::string_view label);

  // out[i] = scale * (sum over ranks q of in_q[rank * n + i]), or added to
  // out[i]. `out` is of any floating-point dtype and does not overlap `in`; the
  // sum is rounded to the dtype of `in` first. Sums that are added to one `out`
  // may be started before those in front of them are done, and are made in this
  // order if they are waited for in it.
  absl::StatusOr<std::unique_ptr<Work>> ReduceScatterScaled(
      const at::Tensor& out, const at::Tensor& in, ScaledSum sum,
      absl::string_view label);

  // out[r * n + i] = in_r[rank * n + i], n = in.numel() / world_size, which has
  // no remainder; both are of one size and do not overlap. Unimplemented, on
  // all ranks alike and at once, unless HasAllToAll().
  absl::StatusOr<std::unique_ptr<Work>> AllToAll(const at::Tensor& out,
                                                 const at::Tensor& in,
                                                 absl::string_view label);

  // In place; every rank ends with the same bits.
  absl::StatusOr<std::unique_ptr<Work>> AllReduce(const at::Tensor& tensor,
                                                  ReduceOp op,
                                                  absl::string_view label);

  // Copies the tensor of rank `root` to all.
  absl::StatusOr<std::unique_ptr<Work>> Broadcast(const at::Tensor& tensor,
                                                  int root,
                                                  absl::string_view label);

  // A group of the ranks that pass the same `color` >= 0, ordered by `key`,
  // then by rank. Collective over this group; this object stays usable.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                              int key) = 0;

  // Makes pending and later operations of this rank fail with Aborted and
  // `reason`, and tells the peers as far as the backend can, so that nobody
  // waits for this rank. Never blocks long, never fails; idempotent: the first
  // reason stays.
  virtual void Abort(const absl::Status& reason) = 0;

 protected:
  // AllocateSymmetric for backends that reach plain memory best.
  static absl::StatusOr<at::Tensor> AllocatePlain(int64_t bytes);

  // As the public methods; arguments are checked.
  virtual absl::StatusOr<std::unique_ptr<Work>> DoAllGather(
      const at::Tensor& out, const at::Tensor& in, absl::string_view label) = 0;
  virtual absl::StatusOr<std::unique_ptr<Work>> DoReduceScatter(
      const at::Tensor& out, const at::Tensor& in, ReduceOp op,
      absl::string_view label) = 0;
  // Sums in place by DoReduceScatter() and scales in Wait(), unless overridden.
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

// How a group comes by its backend for a device's tensors.

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Where the ranks of a device's backend meet.
struct DeviceMeeting {
  c10::intrusive_ptr<c10d::Store> store;  // of this backend alone
  int local_rank = 0;                     // among the ranks of this host
  absl::Duration timeout;  // Communicator::default_timeout() of the backend
  Communicator& host;      // of the same ranks, to be split
};

// Connects one rank, in the thread of the caller. Blocks until all have come.
using ConnectDevice =
    std::function<absl::StatusOr<std::unique_ptr<Communicator>>(
        const DeviceMeeting& meeting)>;

}  // namespace fsdp::comm

#endif  // COMM_COMMUNICATOR_H_
