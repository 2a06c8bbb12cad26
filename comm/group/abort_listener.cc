#include "comm/group/abort_listener.h"

#include <ATen/ops/zeros.h>

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "comm/work.h"

namespace fsdp::comm {
namespace {

using Started = absl::StatusOr<std::unique_ptr<Work>>;

Started Start(Communicator& group) {
  return group.Broadcast(at::zeros({1}), /*root=*/0, "the failure watch");
}

}  // namespace

AbortListener::AbortListener(
    Communicator* group, std::function<void(const absl::Status&)> on_failure)
    : group_(group), on_failure_(std::move(on_failure)) {}

AbortListener::~AbortListener() { Join(); }

absl::Status AbortListener::Begin() {
  if (group_->rank() == 0) return absl::OkStatus();
  const auto watch = [this, work = std::make_shared<Started>(Start(*group_))] {
    result_ =
        work->ok() ? (**work)->Wait(absl::InfiniteFuture()) : work->status();
    if (!result_.ok()) on_failure_(result_);
  };
  FSDP_ASSIGN_OR_RETURN(thread_, StartThread("to watch the group", watch));
  return absl::OkStatus();
}

absl::Status AbortListener::End() {
  if (group_->rank() == 0) {
    FSDP_ASSIGN_OR_RETURN(auto work, Start(*group_));
    return work->Wait(absl::InfiniteFuture());
  }
  Join();
  return result_;
}

void AbortListener::Join() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace fsdp::comm
