// One rank's process in a simulation, which does what a training does with
// Membership, one action after the other; its access to the registers, to which
// anything may happen; and a checker of what replicas promise.
#ifndef REPLICAS_MEMBERSHIP_TESTING_SIMULATED_RANK_H_
#define REPLICAS_MEMBERSHIP_TESTING_SIMULATED_RANK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/memory_registers.h"

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

// Says naively what replicas that outlive each other promise: by who did what,
// as the simulation saw it, and without a look at how it is done.
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

// Fates of a call; all but kDone are Unavailable.
enum class Fate {
  kDone,
  kLost,     // nobody hears of it
  kNoReply,  // it is done
  kDelayed,  // it is done later
};

// Is for one thread. It waits for nothing: Await() returns at once.
class FaultyRegisters final : public ForwardingRegisters {
 public:
  struct Hooks {
    // Is asked before each call; others may run meanwhile.
    std::function<Fate()> fate;
    // Takes a call that is to be done later.
    std::function<void(const std::function<void()>&)> later;
    // Is called after each exchange.
    std::function<void()> exchanged;
  };

  // `base` outlives it and everything that is to be done later.
  FaultyRegisters(Registers* base, Hooks hooks)
      : ForwardingRegisters(base), hooks_(std::move(hooks)) {}

  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override;
  absl::Status Await(const std::string& key, absl::Time deadline) override;

 private:
  absl::Status Allow(const std::function<void()>& call) override;

  const Hooks hooks_;
};

class SimulatedRank;

// The ranks of one incarnation, and what they tell each other directly.
struct SimulatedReplica {
  ReplicaId id;
  std::vector<std::unique_ptr<SimulatedRank>> ranks;
  bool is_over = false;  // all of its processes are to end
  // By how often a rank has come so far.
  std::map<int, int64_t> numbers;  // the entry with which all begin
  std::map<int, int> evicted;      // how many ranks know it
};

// A rank asks these of its world.
struct RankSurroundings {
  LogChecker* checker;
  std::function<int(int)> random;  // 0 to n - 1
  // Returns that replica's rank of the same number, null if it does not run.
  std::function<SimulatedRank*(const ReplicaId&)> peer;
  std::function<void(const State&)> save;
};

class SimulatedRank {
 public:
  SimulatedRank(const MembershipOptions& options,
                std::unique_ptr<Registers> registers, SimulatedReplica* replica,
                const State& checkpoint, const RankSurroundings& surroundings);

  void Act();

  bool is_done() const { return phase_ == Phase::kDone; }
  bool was_evicted() const { return was_evicted_; }
  std::string Text() const;

  // The world sets these: killed, asleep until then, amid an action.
  bool is_dead = false;
  absl::Time asleep_until = absl::InfinitePast();
  bool is_acting = false;

 private:
  enum class Phase {
    kRequest,
    kJoin,
    kFollow,
    kTake,
    kCompute,
    kWait,
    kEvicted,
    kDone
  };

  void Join();
  void Follow();
  void Take();
  void Compute();
  void Wait();
  void Return();
  void Enter(const Roster& roster);
  // Watches, and gives up what a newer epoch has made useless.
  bool IsAborted();
  // Returns whether the call is over for now; reacts to lasting errors.
  bool Failed(const absl::Status& status);

  const MembershipOptions options_;
  const std::unique_ptr<Registers> registers_;
  SimulatedReplica* const replica_;
  const RankSurroundings surroundings_;
  std::unique_ptr<Membership> membership_;

  Phase phase_;
  int coming_ = 0;
  State state_;
  bool is_whole_ = true;  // whether state_ is
  Roster roster_;
  int work_ = 0;
  bool has_voted_ = false;
  bool was_evicted_ = false;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_SIMULATED_RANK_H_
