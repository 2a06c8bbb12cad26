// A column: the ranks of the same number in all replicas that take part.
#ifndef REPLICAS_COLUMN_H_
#define REPLICAS_COLUMN_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
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

}  // namespace fsdp::replicas

#endif  // REPLICAS_COLUMN_H_
