// What the ranks of a failed group tell each other, and what one of them then
// tells its caller.
#ifndef COMM_GROUP_FAILURE_REPORT_H_
#define COMM_GROUP_FAILURE_REPORT_H_

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/call.h"

namespace fsdp::comm {

// Why a rank's group ended. One failure makes others: of several causes the
// one that comes first here explains the rest.
enum class Cause {
  kAbort,     // the rank called Abort()
  kMismatch,  // the rank saw that the calls differ
  kDeadline,  // the rank waited long enough
  kLeft,      // the rank destroyed its communicator
  kLost,      // the rank lost a connection
  kEcho,      // the rank was told by another
};

struct RankReport {
  Cause cause = Cause::kEcho;
  std::string text;      // why, in the rank's own words
  std::string position;  // "is in all-gather #17 of blocks.2"
};

// One string for a report, and back; nullopt for what is not a report.
std::string Encode(const RankReport& report);
std::optional<RankReport> Decode(absl::string_view text);

// Whether `reports` explain the failure: to ask further ranks is not needed.
bool Explains(absl::Span<const std::optional<RankReport>> reports);

// The status of rank `rank`'s operations, with the codes of Work::Wait. By
// rank, nullopt for a rank that did not answer; rank's own is there.
// `store_answers` is false when no rank could have been heard.
absl::Status Verdict(int rank, const RankNames& names,
                     absl::Span<const std::optional<RankReport>> reports,
                     bool store_answers);

}  // namespace fsdp::comm

// Tells the ranks of a group about each other's failures, by way of a store
// that lives outside the group's own connections.

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Publishes one rank's report and collects the others'. A thread waits in the
// store for a peer's alarm, so that failures reach idle ranks too; another one,
// started by the first report, publishes it and collects the others'. The store
// may stop answering at any time: no call of this class waits for it, and a
// thread that is stuck in it is left behind. Thread-safe.
class ReportExchange {
 public:
  struct Findings {
    std::vector<std::optional<RankReport>> reports;  // by rank
    bool store_answers = true;
  };

  // `store` is cloned, twice.
  static absl::StatusOr<std::unique_ptr<ReportExchange>> Create(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size);

  // Calls Stop().
  ~ReportExchange();

  // Starts to watch. `on_alarm` runs in the watching thread, once, when a peer
  // has reported a failure, before or after this rank has. Once.
  // ResourceExhausted: no thread can be started.
  absl::Status Start(std::function<void()> on_alarm);

  // Ends the threads within seconds, also of a store that does not answer: no
  // on_alarm runs afterwards.
  void Stop();

  // Says that this rank makes no more calls, unless it has reported a failure.
  // Takes no longer than Stop().
  void Leave(const RankReport& report);

  // Starts to publish this rank's failure and to collect the others' reports
  // for up to `collect_for`. Alarms the peers unless it is itself an echo. Only
  // the first call counts.
  void Report(const RankReport& report, absl::Duration collect_for);

  // What is known once it explains the failure, all ranks have answered, the
  // time for collecting is over, or `deadline` has passed. Waits for Report(),
  // too.
  Findings Await(absl::Time deadline);

 private:
  struct State;

  explicit ReportExchange(std::shared_ptr<State> state);

  // Makes a call of the store in a thread, for which whoever leaves waits for
  // some seconds. With the state's mutex held, which is free in between.
  void CallBriefly(const std::function<absl::Status()>& call);

  const std::shared_ptr<State> state_;
};

// A Status as text that travels between ranks.

// "9 the message".
std::string EncodeStatus(const absl::Status& status);

// nullopt for what EncodeStatus() does not write: no code, or one that is none.
std::optional<absl::Status> DecodeStatus(absl::string_view text);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_FAILURE_REPORT_H_
