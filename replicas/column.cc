#include "replicas/column.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"

namespace fsdp::replicas {
namespace {

absl::Status EpochIsOver(int64_t epoch) {
  return absl::CancelledError(absl::StrCat("epoch ", epoch, " is over"));
}

}  // namespace

absl::Status Column::Connect(int64_t epoch, int index, int size) {
  {
    // Destroyed outside the lock, since that may take a while.
    std::shared_ptr<comm::Communicator> before;
    absl::MutexLock lock(&mutex_);
    before = std::exchange(ranks_, nullptr);
    epoch_ = -1;
  }
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> ranks,
                        ConnectGroup(epoch, "", index, size));
  absl::MutexLock lock(&mutex_);
  ranks_ = std::move(ranks);
  epoch_ = epoch;
  if (epoch < first_alive_) return EpochIsOver(epoch);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<comm::Communicator>> Column::ConnectPart(
    int index, int size) {
  int64_t epoch = -1;
  {
    absl::MutexLock lock(&mutex_);
    epoch = epoch_;
  }
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> part,
                        ConnectGroup(epoch, "/part", index, size));
  absl::MutexLock lock(&mutex_);
  part_ = part;
  if (epoch < first_alive_) return EpochIsOver(epoch);
  return part;
}

absl::StatusOr<std::shared_ptr<comm::Communicator>> Column::ConnectGroup(
    int64_t epoch, absl::string_view name, int index, int size) {
  comm::Environment environment = place_;
  environment.rank = index;
  environment.world_size = size;
  environment.kept_store_prefix =
      absl::StrCat(place_.kept_store_prefix, "/epoch/", epoch, name);
  comm::ConnectOptions options = options_;
  options.shows_failures = false;  // replicas may come and go
  options.stop_requested = [this, epoch] {
    {
      absl::MutexLock lock(&mutex_);
      if (epoch < first_alive_) return true;
    }
    return options_.stop_requested && options_.stop_requested();
  };
  absl::StatusOr<std::unique_ptr<comm::Communicator>> ranks =
      comm::Connect(environment, options);
  if (ranks.ok()) return *std::move(ranks);
  return Annotate(ranks.status(),
                  absl::StrCat("connecting replicas in epoch ", epoch));
}

void Column::EndBefore(int64_t epoch, const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    first_alive_ = std::max(first_alive_, epoch);
  }
  EndGroups(epoch, reason);
}

void Column::EndGroups(int64_t epoch, const absl::Status& reason) {
  std::array<std::shared_ptr<comm::Communicator>, 2> ended;
  {
    absl::MutexLock lock(&mutex_);
    if (epoch_ < epoch) ended = {part_.lock(), ranks_};
  }
  for (const auto& group : ended) {
    if (group != nullptr) group->Abort(reason);
  }
}

}  // namespace fsdp::replicas
