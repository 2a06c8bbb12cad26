// Records the order in which units run, and predicts the next ones.
#ifndef FSDP_SCHEDULE_UNIT_ORDER_H_
#define FSDP_SCHEDULE_UNIT_ORDER_H_

#include <cstddef>
#include <vector>

namespace fsdp {

// It expects a forward to go like the forward before, and a backward like this
// iteration's forward in reverse. A unit may run several times.
class UnitOrder {
 public:
  static constexpr int kNone = -1;

  // These enclose an outermost forward.
  void BeginForward();
  void EndForward() { previous_forward_ = forward_; }
  void BeginBackward() { backward_cursor_ = post_forward_.size(); }
  // Forgets the iteration, but not the last complete forward.
  void Forget();

  void AddForward(int unit) { forward_.push_back(unit); }
  // Adds a unit that has computed and expects a backward.
  void AddExpectedBackward(int unit) { post_forward_.push_back(unit); }

  // Notes that `unit` runs, and returns the next one; kNone if `unit` was not
  // expected or is the last.
  int NextInForward(int unit);
  int NextInBackward(int unit);

  // Returns unit `i`, from 0, of those to come; kNone if there are fewer.
  int ToComeInForward(size_t i) const;
  int ToComeInBackward(size_t i) const;

 private:
  std::vector<int> forward_;           // this forward, by kPreForward
  std::vector<int> previous_forward_;  // the last complete forward
  size_t forward_cursor_ = 0;          // index in it of the first to come
  std::vector<int> post_forward_;      // units that expect a backward
  size_t backward_cursor_ = 0;         // entries before it are to come
};

}  // namespace fsdp

#endif  // FSDP_SCHEDULE_UNIT_ORDER_H_
