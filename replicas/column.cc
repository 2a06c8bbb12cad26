#include "replicas/column.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/torch_status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"

namespace fsdp::replicas {

absl::Status Column::Connect(int64_t epoch, int index, int size) {
  {
    // Ends outside the lock: that may take a while.
    std::shared_ptr<comm::Communicator> before;
    absl::MutexLock lock(&mutex_);
    before = std::exchange(ranks_, nullptr);
    epoch_ = -1;
  }
  comm::Environment environment = place_;
  environment.rank = index;
  environment.world_size = size;
  environment.kept_store_prefix =
      absl::StrCat(place_.kept_store_prefix, "/epoch/", epoch);
  comm::ConnectOptions options = options_;
  options.shows_failures = false;  // replicas may come and go
  options.stop_requested = [this, epoch] {
    return IsOver(epoch) ||
           (options_.stop_requested && options_.stop_requested());
  };
  absl::StatusOr<std::unique_ptr<comm::Communicator>> ranks =
      comm::Connect(environment, options);
  if (!ranks.ok()) {
    return Annotate(ranks.status(),
                    absl::StrCat("connecting replicas in epoch ", epoch));
  }
  absl::MutexLock lock(&mutex_);
  ranks_ = *std::move(ranks);
  epoch_ = epoch;
  if (epoch < first_alive_) {
    return absl::CancelledError(absl::StrCat("epoch ", epoch, " is over"));
  }
  return absl::OkStatus();
}

bool Column::IsOf(int64_t epoch) const {
  absl::MutexLock lock(&mutex_);
  return ranks_ != nullptr && epoch_ == epoch;
}

bool Column::IsOver(int64_t epoch) const {
  absl::MutexLock lock(&mutex_);
  return epoch < first_alive_;
}

void Column::EndBefore(int64_t epoch, const absl::Status& reason) {
  std::shared_ptr<comm::Communicator> ended;
  {
    absl::MutexLock lock(&mutex_);
    first_alive_ = std::max(first_alive_, epoch);
    if (ranks_ != nullptr && epoch_ < epoch) ended = ranks_;
  }
  if (ended != nullptr) ended->Abort(reason);
}

void Column::Abort(const absl::Status& reason) {
  std::shared_ptr<comm::Communicator> ended;
  {
    absl::MutexLock lock(&mutex_);
    ended = ranks_;
  }
  if (ended != nullptr) ended->Abort(reason);
}

}  // namespace fsdp::replicas
