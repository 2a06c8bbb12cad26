// Makes random models and what may happen to them: forwards and backwards in
// any nesting, units that are left out or used twice, recomputation, errors,
// and requests of a user.
#ifndef FSDP_SCHEDULE_TESTING_RANDOM_STEPS_H_
#define FSDP_SCHEDULE_TESTING_RANDOM_STEPS_H_

#include <vector>

#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/choices.h"
#include "fsdp/schedule/testing/schedule_trace.h"

namespace fsdp::testing {

class RandomModel {
 public:
  // `choices` outlives this object.
  explicit RandomModel(Choices* choices);

  const std::vector<ScheduledUnit>& units() const { return units_; }
  const ScheduleOptions& options() const { return options_; }

  // Makes the next step, or another piece of a training. If a schedule refuses
  // one of its events, a Reset and the next step have to follow.
  Events Step();

  // Makes a step of any events, whether they make sense or not.
  Events Nonsense();

 private:
  enum class Mode { kGrad, kNoGrad, kRecompute };

  // One use of a unit in a forward, and what becomes of it in backward.
  struct Call {
    int unit;
    bool needs_grad;  // its output needs grad
    bool reached;     // the gradient reaches it
    bool completed;   // its parameters get their gradients
    bool recomputed;
    bool backward_at_once;  // inside the forward
    std::vector<Call> calls;
  };

  void AddUnit(int parent);
  int AnyUnit();
  Call MakeCall(int unit);
  void AppendForward(const Call& call, Mode mode, Events& events);
  void AppendPostBackward(int unit, Events& events);
  void AppendBackwardOf(const Call& call, Events& events);
  void AppendEndOfBackward(Events& events);
  void AppendBackward(const Call& root, Events& events);
  Event Request();
  void InsertRequests(Events& events);

  Choices& choices_;
  std::vector<ScheduledUnit> units_;
  std::vector<bool> frozen_;
  ScheduleOptions options_;
  int percent_synchronized_;
  bool synchronizes_ = true;  // the backward that is being made
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_RANDOM_STEPS_H_
