// Runs the ranks of one attempt to their end.
#ifndef COMM_LAUNCHER_LAUNCHER_SUPERVISOR_H_
#define COMM_LAUNCHER_LAUNCHER_SUPERVISOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/launcher/child_process.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/output_merger.h"

namespace fsdp::comm {

// Waits for the ranks and writes their output, with one thread and one poll().
// Ends the ranks when one fails or the launcher is told to end.
class Supervisor {
 public:
  // `rank_prefix` is that of RankLabel(). `on_failure`, which may be null, is
  // called once, when the first rank does not exit with 0 although nobody has
  // told the launcher to end, and before the others are ended. `options` and
  // `signals` outlive it.
  Supervisor(const LaunchOptions& options, const std::string& rank_prefix,
             std::function<void()> on_failure, SignalQueue* signals,
             std::vector<ChildProcess> children);

  // Returns once all ranks have ended and their output is written, or its
  // reader is given up. Call it once.
  void Run();

  // Writes a line behind the ranks' output, after Run().
  void Say(absl::string_view text);

  LaunchAttempt attempt() const;
  int interrupt_signal() const { return interrupt_signal_; }  // 0: none
  int output_errno() const { return output_.error(); }

 private:
  // The step that the launcher has reached in ending the ranks.
  enum class Phase { kRunning, kGrace, kTerminating, kKilled };

  // The reason of a rank's failure. The greater of two explains the other.
  enum class Reason {
    kEcho,      // it says that another rank has failed
    kDecision,  // it ended by itself
    kVictim,    // it was killed
  };

  size_t alive() const { return children_.size() - reaped_; }
  void WaitForReader();
  void End(int signal);
  void HandleSignals();
  void OnSignal(int signal);
  void Kill();
  void Reap();
  void OnFailure(int rank);
  Reason ReasonOf(int rank) const;

  const LaunchOptions& options_;
  const std::function<void()> on_failure_;
  SignalQueue* const signals_;
  std::vector<ChildProcess> children_;  // by rank
  size_t reaped_ = 0;
  bool has_failed_ = false;  // any of them
  OutputPump output_;
  bool gives_output_up_ = false;
  std::vector<RankEnd> ranks_;
  int first_failed_rank_ = -1;
  int interrupt_signal_ = 0;
  Phase phase_ = Phase::kRunning;
  std::set<int> sent_signals_;                      // to end the ranks
  absl::Time deadline_ = absl::InfiniteFuture();    // of the phase
  absl::Time first_signal_ = absl::InfinitePast();  // that ends the ranks
  absl::Time first_failure_ = absl::InfinitePast();
  const absl::Time start_;
  absl::Time end_ = absl::InfinitePast();
};

// Decides whether a job is started again, from its attempts one by one.
class RestartPolicy {
 public:
  // Make it before the first attempt. `options` outlives it.
  explicit RestartPolicy(const RestartOptions& options);

  struct Decision {
    int ranks = 0;         // of the next attempt; 0: there is none
    absl::Duration pause;  // before it
    std::string why_none;
  };

  // Decides what comes after `attempt`, which has failed.
  Decision Decide(const LaunchAttempt& attempt);

  int restarts() const { return restarts_; }  // so far

 private:
  bool HasGotOn(const LaunchAttempt& attempt);
  absl::Duration Pause() const;

  const RestartOptions& options_;
  int64_t progress_ = 0;
  int restarts_ = 0;
  int without_progress_ = 0;  // attempts in a row
};

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_SUPERVISOR_H_
