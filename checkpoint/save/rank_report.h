// What each rank tells the others when its part of a checkpoint is written.
#ifndef CHECKPOINT_SAVE_RANK_REPORT_H_
#define CHECKPOINT_SAVE_RANK_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/files/checksums.h"

namespace fsdp::checkpoint {

struct RankReport {
  absl::Status status;
  std::string plan;  // what ranks have to agree on, as text
  // Sizes of the files that are this rank's alone, in the plan's order.
  std::vector<int64_t> own_bytes;
  // Of the values that every rank has whole.
  uint32_t whole_values = 0;
  std::vector<Piece> pieces;
};

// For ranks of one byte order.
std::string Encode(const RankReport& report);
// Internal: no such text.
absl::StatusOr<RankReport> Decode(absl::string_view bytes);

// The error of the lowest rank that has one, "rank 2: " in front, or
// InvalidArgument where plans differ, with the first line that does.
absl::Status CheckReports(absl::Span<const RankReport> reports);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_RANK_REPORT_H_
