#include "checkpoint/newest_step.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/files/real_file_system.h"

namespace fsdp::checkpoint {

absl::StatusOr<std::optional<int64_t>> NewestStep(const std::string& folder) {
  const absl::StatusOr<std::optional<Committed>> latest =
      LatestCheckpoint(RealFileSystem(), folder);
  if (absl::IsNotFound(latest.status())) return std::nullopt;
  FSDP_RETURN_IF_ERROR(latest.status());
  if (!latest->has_value()) return std::nullopt;
  return (*latest)->step;
}

}  // namespace fsdp::checkpoint
