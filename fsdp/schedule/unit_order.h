// The order in which units run, and what comes next if it is that of before.
#ifndef FSDP_SCHEDULE_UNIT_ORDER_H_
#define FSDP_SCHEDULE_UNIT_ORDER_H_

#include <cstddef>
#include <vector>

namespace fsdp {

// Forward goes like the forward before, backward like this iteration's forward
// in reverse. A unit may run several times.
class UnitOrder {
 public:
  static constexpr int kNone = -1;

  // An outermost forward.
  void BeginForward();
  void EndForward() { previous_forward_ = forward_; }
  void BeginBackward() { backward_cursor_ = post_forward_.size(); }
  // The iteration is given up; the last complete forward stays known.
  void Forget();

  void AddForward(int unit) { forward_.push_back(unit); }
  // In the order in which units have computed.
  void AddExpectedBackward(int unit) { post_forward_.push_back(unit); }

  // `unit` runs: which one is next? kNone: `unit` is not where it was expected,
  // or the last one.
  int NextInForward(int unit);
  int NextInBackward(int unit);

  // Of the units to come, number `i` from 0; kNone: there are not as many.
  int ToComeInForward(size_t i) const;
  int ToComeInBackward(size_t i) const;

 private:
  std::vector<int> forward_;           // this one, by kPreForward
  std::vector<int> previous_forward_;  // the last complete one
  size_t forward_cursor_ = 0;          // into it: the first to come
  std::vector<int> post_forward_;      // units that expect a backward
  size_t backward_cursor_ = 0;         // entries before it are to come
};

}  // namespace fsdp

#endif  // FSDP_SCHEDULE_UNIT_ORDER_H_
