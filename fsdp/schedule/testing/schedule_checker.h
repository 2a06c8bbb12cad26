// Follows what a schedule's actions gather and reduce, and checks the rules of
// its policy: what may be asked for when, and what is left when something ends.
// MemoryModel checks that values and gradients are the right ones.
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_CHECKER_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_CHECKER_H_

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
    bool guessed = false;    // gathered, and needed by no event so far
    bool requested = false;  // by the user, and not used so far
    bool kept = false;       // gathered over an unsynchronised backward
    bool may_stay = false;   // gathered until a backward
    int forwards = 0;        // under way
    int backwards = 0;       // under way
    int uses_to_come = 0;    // backwards of this iteration's forwards
    bool has_part = false;
    bool synchronizes = true;  // set by kSetReduction
    bool all_reduces = true;
    bool stepped = false;  // since its last forward

    bool in_use() const { return forwards + backwards > 0; }
  };
  struct Reduction {
    int unit;
    bool replicated;
    bool keeps_sums;
  };

  bool MustBeRefused(const Event& event) const;
  bool EndsParts(const Event& event) const;
  void BeforeActions(const Event& event);
  std::string AfterActions(const Event& event);
  std::string Apply(const Event& event, const Action& action);
  std::string ApplyGather(const Event& event, int index);
  std::string ApplyFree(const Event& event, const Action& action);
  std::string ApplyReduction(const Event& event, const Action& action);
  std::string CheckGuess(const Event& event) const;
  std::string CheckCounts(const Event& event, const Actions& actions) const;
  std::string CheckState(const Event& event) const;

  const std::vector<ScheduledUnit> specs_;
  const ScheduleOptions options_;
  std::vector<Unit> units_;
  std::vector<int> forwards_;  // under way
  bool in_backward_ = false;
  bool begins_iteration_ = false;  // the event that is checked
  std::deque<Reduction> reductions_;
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_CHECKER_H_
