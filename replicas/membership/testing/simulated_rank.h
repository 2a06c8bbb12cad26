// One rank's process in a simulation, which does what a training does with
// Membership, one action after the other, and its access to the registers, to
// which anything may happen.
#ifndef REPLICAS_MEMBERSHIP_TESTING_SIMULATED_RANK_H_
#define REPLICAS_MEMBERSHIP_TESTING_SIMULATED_RANK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/log_checker.h"

namespace fsdp::replicas::testing {

// Fates of a call; all but kDone are Unavailable.
enum class Fate {
  kDone,
  kLost,     // nobody hears of it
  kNoReply,  // it is done
  kDelayed,  // it is done later
};

// Is for one thread. It waits for nothing: Await() returns at once.
class FaultyRegisters final : public Registers {
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
      : base_(base), hooks_(std::move(hooks)) {}

  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override;
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override;
  absl::Status Remove(const std::string& key) override;
  absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) override;
  absl::Status Await(const std::string& key, absl::Time deadline) override;

 private:
  // OK: make the call and return its reply.
  absl::Status Meet(const std::function<void()>& call);

  Registers* const base_;
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
