// Records the order in which units run, and predicts the next ones.
#ifndef FSDP_SCHEDULE_UNIT_ORDER_H_
#define FSDP_SCHEDULE_UNIT_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp {

// It expects a forward to go like the forward before, and a backward like this
// iteration's forward in reverse. A unit may run several times.
class UnitOrder {
 public:
  static constexpr int kNone = -1;

  // These enclose an outermost forward.
  void BeginForward() {
    Forget();
    forward_cursor_ = 0;
  }
  void EndForward() { previous_forward_ = forward_; }
  void BeginBackward() { backward_cursor_ = post_forward_.size(); }
  // Forgets the iteration, but not the last complete forward.
  void Forget() {
    forward_.clear();
    post_forward_.clear();
  }

  void AddForward(int unit) { forward_.push_back(unit); }
  // Adds a unit that has computed and expects a backward.
  void AddExpectedBackward(int unit) { post_forward_.push_back(unit); }

  // Notes that `unit` runs, and returns the next one; kNone if `unit` was not
  // expected or is the last.
  int NextInForward(int unit) {
    const auto begin = previous_forward_.begin();
    const auto end = previous_forward_.end();
    const auto found =
        std::find(begin + static_cast<int64_t>(forward_cursor_), end, unit);
    if (found == end) return kNone;
    forward_cursor_ = found + 1 - begin;
    return found + 1 == end ? kNone : *(found + 1);
  }
  int NextInBackward(int unit) {
    // A forward inside the backward may have begun a new order.
    size_t i = std::min(backward_cursor_, post_forward_.size());
    while (i > 0 && post_forward_[i - 1] != unit) --i;
    if (i == 0) return kNone;
    backward_cursor_ = i - 1;
    return backward_cursor_ == 0 ? kNone : post_forward_[backward_cursor_ - 1];
  }

  // Returns unit `i`, from 0, of those to come; kNone if there are fewer.
  int ToComeInForward(size_t i) const {
    const size_t place = forward_cursor_ + i;
    return place < previous_forward_.size() ? previous_forward_[place] : kNone;
  }
  int ToComeInBackward(size_t i) const {
    return i < backward_cursor_ && backward_cursor_ <= post_forward_.size()
               ? post_forward_[backward_cursor_ - 1 - i]
               : kNone;
  }

 private:
  std::vector<int> forward_;           // this forward, by kPreForward
  std::vector<int> previous_forward_;  // the last complete forward
  size_t forward_cursor_ = 0;          // index in it of the first to come
  std::vector<int> post_forward_;      // units that expect a backward
  size_t backward_cursor_ = 0;         // entries before it are to come
};

}  // namespace fsdp

#endif  // FSDP_SCHEDULE_UNIT_ORDER_H_
