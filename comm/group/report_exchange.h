// Tells the ranks of a group about each other's failures, by way of a store
// that lives outside the group's own connections.
#ifndef COMM_GROUP_REPORT_EXCHANGE_H_
#define COMM_GROUP_REPORT_EXCHANGE_H_

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/group/failure_report.h"

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

}  // namespace fsdp::comm

#endif  // COMM_GROUP_REPORT_EXCHANGE_H_
