#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include "absl/strings/strip.h"
#include "base/check.h"
#include "fsdp/trace/trace_timeline.h"

namespace fsdp {
namespace {

constexpr size_t kMostOpen = 256;
// Bounds the memory of a program that makes up names as it goes.
constexpr size_t kMostNames = 1 << 16;
constexpr absl::string_view kNameBeyondThose = "(one of very many names)";

// Returns whether `kind` names a value up to `last`, and sets `found` to it.
template <typename Kind>
bool Find(absl::string_view kind, Kind last, Kind& found) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    found = static_cast<Kind>(i);
    if (kind == Name(found)) return true;
  }
  return false;
}

}  // namespace

NamedScope ParseScope(absl::string_view range) {
  const NamedScope user = {{TraceScope::Kind::kUser}, range};
  absl::string_view rest = range;
  if (!absl::ConsumePrefix(&rest, "fsdp::")) return user;
  const size_t open = rest.find('(');
  if (open == absl::string_view::npos || rest.back() != ')') return user;
  const absl::string_view kind = rest.substr(0, open);
  NamedScope parsed = {{TraceScope::Kind::kAction},
                       rest.substr(open + 1, rest.size() - open - 2)};
  if (Find(kind, ActionKind::kCloseShards, parsed.scope.action)) return parsed;
  parsed.scope.kind = TraceScope::Kind::kEvent;
  if (Find(kind, EventKind::kRelease, parsed.scope.event)) return parsed;
  parsed.scope.kind = TraceScope::Kind::kOrderCheck;
  if (kind == "CheckOrder") return parsed;
  return user;
}

TraceBuffer::TraceBuffer(int64_t capacity) : ring_(capacity) {
  FSDP_CHECK(capacity >= 1);
  open_.reserve(kMostOpen);
}

int TraceBuffer::IndexOf(absl::string_view name) {
  auto found = indices_.find(name);
  if (found != indices_.end()) return found->second;
  if (names_.size() >= kMostNames && name != kNameBeyondThose) {
    return IndexOf(kNameBeyondThose);
  }
  const int index = static_cast<int>(names_.size());
  names_.emplace_back(name);
  bytes_.emplace_back();
  indices_.emplace(names_.back(), index);
  return index;
}

void TraceBuffer::Begin(TraceScope scope, absl::string_view name,
                        int64_t now_ns) {
  if (open_.size() == kMostOpen) {
    ++num_too_deep_;
    return;
  }
  open_.push_back({scope, IndexOf(name), next_sequence_++, now_ns, now_ns});
}

void TraceBuffer::End(int64_t now_ns) {
  if (num_too_deep_ > 0) {
    --num_too_deep_;
    ++num_dropped_;
    return;
  }
  if (open_.empty()) return;
  Record record = open_.back();
  open_.pop_back();
  // A wall clock may be set back.
  record.end_ns = std::max(record.begin_ns, now_ns);
  ring_[next_] = record;
  next_ = (next_ + 1) % ring_.size();
  if (size_ < ring_.size()) {
    ++size_;
  } else {
    ++num_dropped_;
  }
}

void TraceBuffer::SetUnitBytes(absl::string_view unit, UnitBytes bytes) {
  bytes_[IndexOf(unit)] = bytes;
}

std::vector<TraceBuffer::Record> TraceBuffer::Records() const {
  const auto at = [](auto& list, size_t i) {
    return list.begin() + static_cast<std::ptrdiff_t>(i);
  };
  std::vector<Record> records(ring_.begin(), at(ring_, size_));
  // In a full ring, the next record replaces the oldest.
  if (size_ == ring_.size()) {
    std::rotate(records.begin(), at(records, next_), records.end());
  }
  return records;
}

const char* Name(TraceCategory category) {
  static constexpr const char* kNames[] = {
      "forward",   "recompute",   "backward", "gather wait", "reduce wait",
      "fence",     "agreement",   "copy",     "start",       "free",
      "optimizer", "bookkeeping", "user",     "phase",       "step",
      "gathering", "reducing"};
  static_assert(std::size(kNames) ==
                static_cast<int>(TraceCategory::kReducing) + 1);
  return kNames[static_cast<int>(category)];
}

}  // namespace fsdp
