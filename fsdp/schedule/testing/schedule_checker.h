// Follows what a runtime and a model would hold that carry out a schedule's
// actions, and checks the rules that it has to keep.
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_CHECKER_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_CHECKER_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp::testing {

class ScheduleChecker {
 public:
  ScheduleChecker(std::vector<ScheduledUnit> units, ScheduleOptions options);

  // Returns what is wrong with `actions` as the answer to `event`, or "". A
  // refusal has to be one that Schedule::Next() promises.
  std::string Check(const Event& event, const absl::StatusOr<Actions>& actions);

 private:
  enum class Memory { kSharded, kInFlight, kGathered };
  struct Unit {
    Memory memory = Memory::kSharded;
    bool is_copy = false;    // gathered into memory of its own
    bool is_read = false;    // another rank may read it since the last fence
    int64_t gathers = 0;     // counts its gathers
    bool guessed = false;    // gathered, and needed by no event so far
    bool requested = false;  // by the user, and not used so far
    bool kept = false;       // gathered over an unsynchronised backward
    bool may_stay = false;   // gathered until a backward
    int forwards = 0;        // under way
    int backwards = 0;       // under way
    int uses_to_come = 0;    // backwards of this iteration's forwards
    bool has_part = false;
    bool has_whole_gradients = false;
    bool has_sums = false;
    bool synchronizes = true;  // set by kSetReduction
    bool all_reduces = true;
    bool step_due = false;
    bool stepped = false;  // since its last forward
    // Versions of the values. Shards get a new one whenever an optimizer may
    // have stepped.
    int64_t shard = 0;
    int64_t part = 0;
    int64_t gathered = 0;

    bool in_use() const { return forwards + backwards > 0; }
  };
  struct Reduction {
    int unit;
    bool replicated;
    bool keeps_sums;
    int64_t gathers;  // of the unit, if it was freed before; else -1
  };

  bool MustBeRefused(const Event& event) const;
  bool BeginsIteration(const Event& event) const;
  bool EndsParts(const Event& event) const;
  static void Reset(Unit& unit);
  void BeforeActions(const Event& event);
  std::string AfterActions(const Event& event);
  std::string BeginToUse(Unit& unit, int& uses);
  std::string Apply(const Event& event, const Action& action);
  std::string ApplyGather(const Event& event, int index);
  std::string ApplyGatherCopy(const Event& event, int index);
  std::string ApplyFree(const Event& event, const Action& action);
  std::string ApplyReduction(const Event& event, const Action& action);
  std::string ApplyFill(const Event& event, int index);
  std::string ApplyReplicate(int index);
  std::string ApplyKeepSums(int index);
  std::string ApplyReplicateSums(const Event& event, int index);
  bool Reduces(const Event& event) const;
  std::string ApplyStep(const Event& event, int index);
  std::string ApplyOpen(const Event& event);
  std::string ApplyClose(const Event& event);
  void ApplyFence();
  std::string CheckGuess(const Event& event) const;
  std::string CheckCounts(const Event& event, const Actions& actions) const;
  std::string CheckState(const Event& event) const;
  std::string CheckEnds(const Event& event) const;
  std::string CheckFences(const Event& event) const;

  const std::vector<ScheduledUnit> specs_;
  const ScheduleOptions options_;
  std::vector<Unit> units_;
  std::vector<int> forwards_;  // under way
  bool in_backward_ = false;
  bool shares_memory_ = false;
  bool shards_open_ = false;  // since the outermost forward under way began
  bool begins_iteration_ = false;  // the event that is checked
  int filled_ = -1;
  std::deque<Reduction> reductions_;
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_CHECKER_H_
