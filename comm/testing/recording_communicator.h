// Counts and traces the collectives of a communicator.
#ifndef COMM_TESTING_RECORDING_COMMUNICATOR_H_
#define COMM_TESTING_RECORDING_COMMUNICATOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// One collective that was started.
struct CollectiveRecord {
  Collective collective = Collective::kAllGather;
  std::string label;
  int64_t bytes = 0;  // of the whole tensor, not of one rank's shard
};

// Returns "all-gather of blocks.2, 4096 bytes".
std::string ToString(const CollectiveRecord& record);

// Keeps the collectives that were started, in order. Thread-safe, so that ranks
// may share one and others can read it while they run.
class CollectiveLog {
 public:
  struct Totals {
    int64_t count = 0;
    int64_t bytes = 0;
  };

  // The trace keeps the first `max_trace` records; totals count them all.
  explicit CollectiveLog(int64_t max_trace = 100'000) : max_trace_(max_trace) {}

  void Add(CollectiveRecord record);
  void Clear();

  Totals TotalsOf(Collective collective) const;
  Totals TotalsOf(Collective collective, absl::string_view label) const;
  std::vector<CollectiveRecord> Trace() const;

 private:
  const int64_t max_trace_;
  mutable absl::Mutex mutex_;
  std::map<std::pair<Collective, std::string>, Totals> totals_
      ABSL_GUARDED_BY(mutex_);
  std::vector<CollectiveRecord> trace_ ABSL_GUARDED_BY(mutex_);
};

// Returns a communicator that adds every collective that `base` accepts to
// `log`. Its sub-groups record into the same log, which outlives all of them.
std::unique_ptr<Communicator> Record(std::unique_ptr<Communicator> base,
                                     CollectiveLog* log);

}  // namespace fsdp::comm

#endif  // COMM_TESTING_RECORDING_COMMUNICATOR_H_
