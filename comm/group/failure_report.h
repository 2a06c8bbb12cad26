// The errors of groups: the reports by which the ranks of a failed group find
// out why it failed, and what the exceptions of c10d backends mean.
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
#include "base/torch_status.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// Why a rank's group ended. One failure causes others: of several causes the
// first in this list explains the rest.
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
  std::string text = {};      // why, in the rank's own words
  std::string position = {};  // "is in all-gather #17 of blocks.2"
};

// Makes a string of a report; its text is cut after 2048 bytes.
std::string Encode(const RankReport& report);
// Does the reverse. Returns nullopt for a string that is no report.
std::optional<RankReport> Decode(absl::string_view text);

// True if `reports`, by rank, explain the failure, so that no further ranks
// have to be asked.
bool Explains(absl::Span<const std::optional<RankReport>> reports);

// Returns the error of rank `rank`'s operations, with the codes of Work::Wait.
// `reports` are by rank; they have this rank's own, and nullopt for ranks that
// did not answer. `store_answers` is false where no rank could be heard.
absl::Status Verdict(int rank, const RankNames& names,
                     absl::Span<const std::optional<RankReport>> reports,
                     bool store_answers);

// Publishes one rank's report and collects the others', in a store that does
// not need the group's own connections. A thread waits in the store for a
// peer's alarm, so that failures reach idle ranks, too. The first report starts
// another thread, which publishes it and collects the others'. The store may
// stop answering at any time: no call waits for it longer than it says, unless
// no thread can be started, and a stuck thread is left behind. Thread-safe.
class ReportExchange {
 public:
  struct Findings {
    std::vector<std::optional<RankReport>> reports;  // by rank
    bool store_answers = true;
  };

  // Clones `store` twice.
  static absl::StatusOr<std::unique_ptr<ReportExchange>> Create(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size);

  // Calls Stop().
  ~ReportExchange();

  // Starts to watch; call it once. `on_alarm` runs once, in the watching
  // thread, when a peer has reported a failure, before or after this rank has.
  // ResourceExhausted: no thread can be started.
  absl::Status Start(std::function<void()> on_alarm);

  // Ends the threads within seconds, even if the store does not answer. No
  // `on_alarm` runs afterwards.
  void Stop();

  // Tells the peers that this rank makes no more calls, unless it has reported
  // a failure. Takes no longer than Stop().
  void Leave(const RankReport& report);

  // Starts to publish this rank's failure and to collect the others' reports
  // for up to `collect_for`. Alarms the peers unless the cause is kEcho. Only
  // the first call counts.
  void Report(const RankReport& report, absl::Duration collect_for);

  // Waits for Report(), and then until the reports explain the failure, all
  // ranks have answered or the time for collecting is over, but not beyond
  // `deadline`. Returns what is known.
  Findings Await(absl::Time deadline);

 private:
  struct State;

  explicit ReportExchange(std::shared_ptr<State> state);

  // Makes a call of the store in a thread and waits some seconds for it. The
  // state's mutex is held, but released meanwhile.
  void CallBriefly(const std::function<absl::Status()>& call);

  const std::shared_ptr<State> state_;
};

// Returns "rank 3" or "ranks 0, 2"; of many ranks the first ones, and how many
// more there are.
std::string RankList(absl::Span<const int> ranks);

// Makes a text of a status for other ranks: "9 the message".
std::string EncodeStatus(const absl::Status& status);

// Does the reverse. Returns nullopt for a text without a valid code.
std::optional<absl::Status> DecodeStatus(absl::string_view text);

// Returns Unavailable with the text of `status`, without the place in c10d's
// sources and the stack.
absl::Status ConnectionError(const absl::Status& status);

// Does what TorchToStatus() does, for a call of a c10d backend whose arguments
// have been checked. It also maps
//   a text of c10d that the backend lacks an operation  to Unimplemented
//   what is no c10::Error, as of Gloo's connections     to Unavailable
absl::Status C10dToStatus(absl::string_view what, FallibleRef fn);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_FAILURE_REPORT_H_
