// What each rank tells the others when its part of a checkpoint is written.
#ifndef CHECKPOINT_SAVE_RANK_REPORT_H_
#define CHECKPOINT_SAVE_RANK_REPORT_H_

#include <cstdint>
#include <map>
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
  uint32_t plan = 0;  // the checksum of what ranks have to agree on
  // Of the values that every rank has whole.
  uint32_t whole_values = 0;
  // Files that this rank alone writes.
  std::vector<NamedSize> own_files;
  // Of what it has written. Files that ranks write together come first, as
  // they number them; own ones go on from there. None is empty.
  std::vector<Piece> pieces;
};

// For ranks of one byte order. Four bytes for each block that one rank has
// written whole, and what says which files they are of.
std::string Encode(const RankReport& report);
// Internal: no such text. What comes back is no larger than `bytes` justify.
absl::StatusOr<RankReport> Decode(absl::string_view bytes);

// The error of the lowest rank that has one, "rank 2: " in front.
absl::Status CheckReports(absl::Span<const RankReport> reports);

// Whether all ranks have the same plan.
bool HaveOnePlan(absl::Span<const RankReport> reports);

// All files there are, from all ranks' reports without errors, which lose their
// pieces: `shared`, those that ranks write together, and each rank's own.
// Internal: a name that is there twice; pieces of files that there are not, or
// that do not make up the files.
absl::StatusOr<std::map<std::string, FileSums>> CombineReports(
    std::vector<NamedSize> shared, absl::Span<RankReport> reports);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_RANK_REPORT_H_
