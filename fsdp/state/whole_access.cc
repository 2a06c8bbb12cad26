#include "fsdp/state/whole_access.h"

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/agreement.h"

namespace fsdp {

absl::Time DeadlineOf(const ShardedModel& model) {
  return absl::Now() + model.timeout();
}

absl::StatusOr<WholeAccess> WholeAccess::Begin(ShardedModel& model,
                                               absl::string_view what,
                                               bool reads_values) {
  const absl::Status mine = model.BeginWholeAccess(what, reads_values);
  absl::Status all =
      comm::Agree(model.communicator(), mine, what, DeadlineOf(model));
  if (all.ok()) return WholeAccess(&model);
  if (mine.ok()) model.EndWholeAccess();
  return all;
}

absl::StatusOr<WholeAccess> WholeAccess::BeginAlone(ShardedModel& model,
                                                    absl::string_view what) {
  FSDP_RETURN_IF_ERROR(model.BeginWholeAccess(what));
  return WholeAccess(&model);
}

WholeAccess::WholeAccess(WholeAccess&& other) noexcept : model_(other.model_) {
  other.model_ = nullptr;
}

WholeAccess::~WholeAccess() {
  if (model_ != nullptr) model_->EndWholeAccess();
}

}  // namespace fsdp
