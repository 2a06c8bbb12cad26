// The ranks of a save tell each other in rounds that they are alive and how far
// their disks are, and in reports what they have written.
#ifndef CHECKPOINT_SAVE_RANKS_H_
#define CHECKPOINT_SAVE_RANKS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/files/checksums.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

// How much a rank that acts has done so far. Thread-safe.
struct DiskProgress {
  // To be called when a call to the disk returns, which has put `more` on it.
  void CameBack(int64_t more) {
    bytes += more;
    last = absl::ToUnixNanos(absl::Now());
  }

  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> last{0};  // when a call has returned
};

struct RoundOptions {
  // Limits a round: a rank that does not answer within it is gone.
  absl::Duration timeout;
  // A rank is given up when none of its calls to its disk returns for so long.
  absl::Duration stall_timeout;
  // The time between two rounds while this rank acts.
  absl::Duration interval = absl::Seconds(1);
  std::string what;       // "saving step 7", for the error
  int64_t all_bytes = 0;  // that this rank writes, for the error
  // Called with an error as soon as there is one, on another thread, before
  // `act` has returned. May be null.
  std::function<void(const absl::Status&)> on_error = nullptr;
};

// Runs `act`, which throws nothing, on the calling thread, while another thread
// tells the other ranks in rounds that this one is alive and how far it is.
// Collective. Returns OK when `act` has returned on all ranks. Otherwise it
// returns when this rank's has: DeadlineExceeded, the same on all ranks, which
// names the rank that was given up and leaves the communicator usable; or the
// communicator's error.
absl::Status ActInRounds(comm::Communicator& ranks, const RoundOptions& options,
                         const DiskProgress& progress,
                         absl::FunctionRef<void()> act);

// A rank says this when it has written its part of a checkpoint.
struct RankReport {
  absl::Status status;
  uint32_t plan = 0;  // checksum of all that ranks must agree on
  // Checksum of the values that every rank has whole.
  uint32_t whole_values = 0;
  // The files that this rank alone writes.
  std::vector<NamedSize> own_files;
  // The pieces that it has written. Files that ranks write together have their
  // common numbers; the rank's own files are numbered after them.
  std::vector<FilePiece> pieces;
};

// Encodes a report for ranks of the same byte order.
std::string Encode(const RankReport& report);
// Internal: `bytes` is no report. CombineReports() looks at the pieces.
absl::StatusOr<RankReport> Decode(absl::string_view bytes);

// Returns the error of the lowest rank that has one, with "rank 2: " in front
// if there are several ranks.
absl::Status CheckReports(absl::Span<const RankReport> reports);

// Returns the sums of all files, from the reports of all ranks, none of which
// is an error; the reports lose their pieces. `shared` are the files that ranks
// write together. Internal: a name appears twice, or pieces belong to no file
// or do not make up the files.
absl::StatusOr<std::map<std::string, FileSums>> CombineReports(
    std::vector<NamedSize> shared, absl::Span<RankReport> reports);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_RANKS_H_
