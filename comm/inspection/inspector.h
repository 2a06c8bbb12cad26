// Watches what one rank records. Says what the rank waits for, and what all
// ranks were doing when their group failed.
#ifndef COMM_INSPECTION_INSPECTOR_H_
#define COMM_INSPECTION_INSPECTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/peer_records.h"
#include "comm/rank_activity.h"

namespace fsdp::comm {

struct InspectorOptions {
  // If the host has waited this long for an operation, the inspector says so.
  // It does again after twice that time, and so on. Not positive: never.
  absl::Duration warn_after = absl::Seconds(30);
  // The time from one look, and one record for other hosts, to the next. By
  // default a quarter of warn_after, but at most 5 s.
  std::optional<absl::Duration> interval;
  // When the group fails, this rank appends what all ranks were doing to
  // "rank-N.txt" in this folder. Empty: it writes no file.
  std::string folder;
  // If true, a failure is also written to standard error.
  bool shows_failures = true;
  // Called with whole lines, in a thread of the inspector. Null: they go to
  // standard error.
  std::function<void(absl::string_view lines)> write;
};

class Inspector final : public RankActivity {
 public:
  // Starts a thread, unless `peers` is null: then this rank is alone and waits
  // for nobody. ResourceExhausted: no thread can be started.
  static absl::StatusOr<std::shared_ptr<Inspector>> Start(
      InspectorOptions options, std::unique_ptr<PeerRecords> peers);
  ~Inspector() override = default;

  FlightRecorder& recorder() const { return *recorder_; }

  void Note(Phase phase, absl::string_view unit, int64_t pool_bytes) override;
  uint64_t BeginWait(StoreWait wait, absl::string_view what) override;
  void EndWait(uint64_t wait) override;
  std::string Describe() const override;

  // Call it when an operation has failed, and with it the group. The first time
  // the inspector's thread writes what the ranks of this host are doing now,
  // and what the others did last, to the folder. It also writes to standard
  // error if the cause is a deadline or a lost rank and no other rank of the
  // host has done so. Stop() waits for that.
  void OnFailure(FlightRecorder::Ticket ticket, const absl::Status& status);

  // Ends the thread, and with it all watching, within a few seconds. Call it
  // once.
  void Stop();

 private:
  struct Failure {
    uint64_t ticket = 0;
    absl::Status status;
    std::vector<SeenRank> host;  // when it happened
    bool is_shown = false;       // on standard error
  };

  Inspector(InspectorOptions options, std::unique_ptr<PeerRecords> peers);

  void Run();
  void Look();
  bool IsDue(const OperationRecord& operation, int64_t now_ns);
  void Join(const Failure& failure);

  const InspectorOptions options_;
  const std::unique_ptr<PeerRecords> peers_;  // the thread's, but for const
  const std::shared_ptr<FlightRecorder> recorder_;
  std::map<uint64_t, int64_t> due_ns_;  // the thread's: by ticket

  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = true;
  bool has_failed_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);  // to be told
  std::thread thread_;
};

// Returns a communicator that records what is called on it and on its
// sub-groups, fences and allocations included, and tells `inspector` what
// fails. The destructor of the result stops `inspector`; sub-groups may live
// longer.
//
// For collectives on a device only the start is recorded: nobody asks the
// device when they end.
std::unique_ptr<Communicator> Inspect(std::unique_ptr<Communicator> base,
                                      std::shared_ptr<Inspector> inspector);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_INSPECTOR_H_
