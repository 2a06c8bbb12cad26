// The report of a rank to the others when it has written its part of a
// checkpoint.
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
  uint32_t plan = 0;  // checksum of all that ranks must agree on
  // Checksum of the values that every rank has whole.
  uint32_t whole_values = 0;
  // The files that this rank alone writes.
  std::vector<NamedSize> own_files;
  // The pieces that it has written, none empty. Files that ranks write together
  // have their common numbers; the rank's own files are numbered after them.
  std::vector<Piece> pieces;
};

// Encodes a report for ranks of the same byte order: four bytes per block that
// the rank has written whole, and a few that say in which files the blocks are.
std::string Encode(const RankReport& report);
// Internal: `bytes` is no report. The result needs memory in proportion to
// `bytes`.
absl::StatusOr<RankReport> Decode(absl::string_view bytes);

// Returns the error of the lowest rank that has one, with "rank 2: " in front
// if there are several ranks.
absl::Status CheckReports(absl::Span<const RankReport> reports);

// Returns whether all ranks have one plan.
bool HaveOnePlan(absl::Span<const RankReport> reports);

// Returns the sums of all files, from the reports of all ranks, none of which
// is an error; the reports lose their pieces. `shared` are the files that ranks
// write together. Internal: a name appears twice, or pieces belong to no file
// or do not make up the files.
absl::StatusOr<std::map<std::string, FileSums>> CombineReports(
    std::vector<NamedSize> shared, absl::Span<RankReport> reports);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_RANK_REPORT_H_
