// Says naively what replicas that outlive each other promise: by who did what,
// as the simulation saw it, and without a look at how it is done.
#ifndef REPLICAS_MEMBERSHIP_TESTING_LOG_CHECKER_H_
#define REPLICAS_MEMBERSHIP_TESTING_LOG_CHECKER_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "replicas/membership/roster.h"

namespace fsdp::replicas::testing {

// A model's state: which step it begins, and all that it was computed from.
struct State {
  int64_t step = 0;
  uint64_t content = 0;

  friend bool operator==(const State& a, const State& b) {
    return a.step == b.step && a.content == b.content;
  }
};

// Returns the state after `roster`'s step, which began with `state`.
State Trained(const State& state, const Roster& roster);

class LogChecker {
 public:
  LogChecker(int ranks_per_replica, int64_t steps)
      : ranks_(ranks_per_replica), steps_(steps) {}

  // Tell what happens, in its order. A replica asks to join with a state, a
  // rank has the summed gradients of an entry, an entry is made.
  void Requested(const ReplicaId& id, const State& state);
  void Voted(const ReplicaId& id, int rank, const Roster& roster);
  void Made(const Roster& entry);

  // Tell what a process believes: that this is an entry; that this is the state
  // with which the entry's step begins; that the step of `before`, of which it
  // was part, was finished.
  void Saw(const Roster& entry);
  void Begins(const ReplicaId& id, const Roster& entry, const State& state);
  void Applies(const ReplicaId& id, int rank, const Roster& before);

  void Complain(const std::string& text);

  const std::vector<Roster>& log() const { return log_; }
  bool has_ended() const { return !log_.empty() && log_.back().step >= steps_; }
  // Returns what was wrong first, "" if all is as it should be.
  const std::string& finding() const { return finding_; }

 private:
  using Ids = std::set<std::pair<int, int>>;

  static Ids IdsOf(const Roster& roster, bool only_old);
  void CheckFounded(const Roster& before, const Roster& entry);
  void CheckFinished(const Roster& before, const Roster& entry);
  void CheckLost(const Roster& before, const Roster& entry);
  void Want(bool condition, const Roster& entry, const char* text);
  bool HasVoted(const ReplicaId& id, int rank, int64_t number) const;

  const int ranks_;
  const int64_t steps_;
  std::string finding_;
  std::vector<Roster> log_;
  std::vector<State> states_;  // the entries' steps begin with these
  std::map<std::pair<int, int>, State> requests_;
  std::set<std::pair<int64_t, std::string>> votes_;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_LOG_CHECKER_H_
