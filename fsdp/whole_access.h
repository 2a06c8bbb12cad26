// The time in which a model's parameters belong to something other than its
// forward and backward.
#ifndef FSDP_WHOLE_ACCESS_H_
#define FSDP_WHOLE_ACCESS_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "fsdp/sharded_model.h"

namespace fsdp {

// Ends with the object.
class WholeAccess {
 public:
  // Collective; what ShardedModel::BeginWholeAccess() refuses on one rank is
  // refused on all. `what` names the caller: "FullStateDict()".
  static absl::StatusOr<WholeAccess> Begin(ShardedModel& model,
                                           absl::string_view what);
  WholeAccess(WholeAccess&& other) noexcept;
  WholeAccess& operator=(WholeAccess&&) = delete;
  ~WholeAccess();

 private:
  explicit WholeAccess(ShardedModel* model) : model_(model) {}

  ShardedModel* model_;
};

// For a wait that begins now.
absl::Time DeadlineOf(const ShardedModel& model);

}  // namespace fsdp

#endif  // FSDP_WHOLE_ACCESS_H_
