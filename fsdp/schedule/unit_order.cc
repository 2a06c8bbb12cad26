#include "fsdp/schedule/unit_order.h"

#include <algorithm>

namespace fsdp {

void UnitOrder::BeginForward() {
  forward_.clear();
  post_forward_.clear();
  forward_cursor_ = 0;
}

void UnitOrder::Forget() {
  forward_.clear();
  post_forward_.clear();
}

int UnitOrder::NextInForward(int unit) {
  const auto begin = previous_forward_.begin();
  const auto end = previous_forward_.end();
  const auto found =
      std::find(begin + static_cast<int64_t>(forward_cursor_), end, unit);
  if (found == end) return kNone;
  forward_cursor_ = found + 1 - begin;
  return found + 1 == end ? kNone : *(found + 1);
}

int UnitOrder::NextInBackward(int unit) {
  // A forward inside the backward may have begun a new order.
  size_t i = std::min(backward_cursor_, post_forward_.size());
  while (i > 0 && post_forward_[i - 1] != unit) --i;
  if (i == 0) return kNone;
  backward_cursor_ = i - 1;
  return backward_cursor_ == 0 ? kNone : post_forward_[backward_cursor_ - 1];
}

int UnitOrder::ToComeInForward(size_t i) const {
  const size_t place = forward_cursor_ + i;
  return place < previous_forward_.size() ? previous_forward_[place] : kNone;
}

int UnitOrder::ToComeInBackward(size_t i) const {
  return i < backward_cursor_ && backward_cursor_ <= post_forward_.size()
             ? post_forward_[backward_cursor_ - 1 - i]
             : kNone;
}

}  // namespace fsdp
