// The ranks of one number in all replicas that take part.
#ifndef REPLICAS_COLUMN_H_
#define REPLICAS_COLUMN_H_

#include <array>
#include <cstdint>
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

// A group of its own in each epoch, since its members differ. Used by one
// thread; another one ends what is of an epoch that is over.
class Column {
 public:
  // `place`: where the ranks of the column meet, with its keys' prefix; which
  // rank this is, and of how many, is another matter in each epoch.
  Column(comm::Environment place, comm::ConnectOptions options)
      : place_(std::move(place)), options_(std::move(options)) {}

  // Gives the group of an earlier epoch up and joins that of `epoch` as rank
  // `index` of `size`. Errors as of comm::Connect(). Cancelled: the epoch is
  // over already.
  absl::Status Connect(int64_t epoch, int index, int size);

  // A group of some of the column's ranks, of which this is `index` of `size`;
  // once in an epoch, after Connect() was OK. It ends as the column does.
  absl::StatusOr<std::shared_ptr<comm::Communicator>> ConnectPart(int index,
                                                                  int size);

  // After Connect() was OK.
  comm::Communicator& ranks() {
    absl::MutexLock lock(&mutex_);
    return *ranks_;
  }

  // Whoever waits in a group of an epoch before `epoch`, or for one, returns at
  // once. From any thread.
  void EndBefore(int64_t epoch, const absl::Status& reason);
  // Ends what there is.
  void Abort(const absl::Status& reason);

 private:
  absl::StatusOr<std::shared_ptr<comm::Communicator>> ConnectGroup(
      int64_t epoch, absl::string_view name, int index, int size);
  using Groups = std::array<std::shared_ptr<comm::Communicator>, 2>;
  Groups GroupsLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void End(const Groups& groups, const absl::Status& reason);
  bool IsOver(int64_t epoch) const;

  const comm::Environment place_;
  const comm::ConnectOptions options_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<comm::Communicator> ranks_ ABSL_GUARDED_BY(mutex_);
  std::weak_ptr<comm::Communicator> part_ ABSL_GUARDED_BY(mutex_);
  int64_t epoch_ ABSL_GUARDED_BY(mutex_) = -1;       // of both
  int64_t first_alive_ ABSL_GUARDED_BY(mutex_) = 0;  // the others are over
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_COLUMN_H_
