// A column: the ranks of the same number in all replicas that take part, and
// what they do together: average gradients, and hand a training run over.
#ifndef REPLICAS_COLUMN_H_
#define REPLICAS_COLUMN_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"

namespace fsdp::replicas {

// Connects this rank to its column. The members differ between epochs, and each
// has its own group. One thread uses a Column; another ends groups of epochs
// that are over.
class Column {
 public:
  // The ranks of the column meet at `place`, under its prefix of keys. Which
  // rank this is, and of how many, is said to Connect().
  Column(comm::Environment place, comm::ConnectOptions options)
      : place_(std::move(place)), options_(std::move(options)) {}

  // Gives up the group of an earlier epoch and joins that of `epoch` as rank
  // `index` of `size`. Errors are those of comm::Connect(), and Cancelled if
  // the epoch is over already.
  absl::Status Connect(int64_t epoch, int index, int size);

  // Connects a group of some ranks of the column, as `index` of `size`, once
  // per epoch after Connect() was OK. It ends when the column's group does.
  absl::StatusOr<std::shared_ptr<comm::Communicator>> ConnectPart(int index,
                                                                  int size);

  // The group of the epoch, after Connect() was OK.
  comm::Communicator& ranks() {
    absl::MutexLock lock(&mutex_);
    return *ranks_;
  }

  // Ends the groups of epochs before `epoch`: whoever waits in one, or to
  // connect one, returns at once. Any thread may call it.
  void EndBefore(int64_t epoch, const absl::Status& reason);
  // Ends the groups of the current epoch.
  void Abort(const absl::Status& reason) {
    EndGroups(std::numeric_limits<int64_t>::max(), reason);
  }

 private:
  absl::StatusOr<std::shared_ptr<comm::Communicator>> ConnectGroup(
      int64_t epoch, absl::string_view name, int index, int size);
  // Ends the groups, if they are of an epoch before `epoch`.
  void EndGroups(int64_t epoch, const absl::Status& reason);

  const comm::Environment place_;
  const comm::ConnectOptions options_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<comm::Communicator> ranks_ ABSL_GUARDED_BY(mutex_);
  std::weak_ptr<comm::Communicator> part_ ABSL_GUARDED_BY(mutex_);
  int64_t epoch_ ABSL_GUARDED_BY(mutex_) = -1;       // of both groups
  int64_t first_alive_ ABSL_GUARDED_BY(mutex_) = 0;  // earlier epochs are over
};

// Averages one rank's gradients with its column's, in two parts, because a
// replica may be lost in between: gradients stay as they are until it is known
// over whom the mean is. Needs as much memory as the gradients. Not
// thread-safe.
class GradientMeans {
 public:
  // `column` outlives it. `leaves` are the tensors that the optimizer steps, in
  // the same order and of the same sizes and dtypes on all of the column.
  GradientMeans(comm::Communicator& column, std::vector<at::Tensor> leaves)
      : column_(column), leaves_(std::move(leaves)) {}

  // Sums the gradients of the column, into memory of its own. A leaf with a
  // gradient on some ranks counts as zeros on the others. Collective; sums are
  // made in the order of ranks, the same bits on all. After an error of any
  // rank the column is aborted.
  absl::Status Sum(absl::Time deadline);

  // Call it once, after Sum() was OK: sets gradients to the sums divided by the
  // number of ranks of the column. Sends no messages. After an error some are
  // set.
  absl::Status Apply();

 private:
  // A sum holds the gradients of one device and dtype, leaf after leaf.
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, c10::ScalarType>;
  // A leaf that has a gradient anywhere in the column.
  struct Part {
    size_t leaf;
    Kind kind;
    int64_t begin;  // in sums_, in elements
  };

  absl::Status Plan(absl::Time deadline);
  absl::Status AddUp(absl::Time deadline);
  absl::Status CopyGradient(const Part& part) const;
  at::Tensor SumOf(const Part& part) const;

  comm::Communicator& column_;
  const std::vector<at::Tensor> leaves_;
  std::vector<Part> parts_;
  std::map<Kind, at::Tensor> sums_;  // kept from step to step
};

// Makes the runs of all `ranks` equal to that of `root`, to the bit:
// parameters, buffers, the optimizer's states and options, the average of the
// weights, schedulers, scaler and run.entries. Random states and rank_entries,
// which belong to a rank, stay as they are.
//
// `ranks` are one rank of each replica, all with the same shards. Collective.
// Call it between steps, or before the optimizer steps. Shards are sent as they
// are, one after the other, so that little more memory is needed than they
// take. Errors, on all ranks: InvalidArgument, with nothing changed, if the
// models or the optimizers differ. Other errors, also the communicator's, which
// is then aborted, leave runs partly filled.
absl::Status HandOver(comm::Communicator& ranks, int root,
                      checkpoint::TrainingRun& run, absl::Time deadline);

}  // namespace fsdp::replicas

#endif  // REPLICAS_COLUMN_H_
