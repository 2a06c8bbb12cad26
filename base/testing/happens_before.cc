#include "base/testing/happens_before.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::testing {
namespace {

void Join(HappensBefore::Clock& into, const HappensBefore::Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t actor = 0; actor < from.size(); ++actor) {
    into[actor] = std::max(into[actor], from[actor]);
  }
}

std::string ActorName(int actor) {
  return actor == HappensBefore::kHost ? "the host"
                                       : absl::StrCat("stream ", actor - 1);
}

}  // namespace

HappensBefore::Clock& HappensBefore::ClockOf(int actor) {
  const auto index = static_cast<size_t>(actor);
  if (clocks_.size() <= index) clocks_.resize(index + 1);
  if (clocks_[index].size() <= index) clocks_[index].resize(index + 1);
  return clocks_[index];
}

int64_t HappensBefore::Advance(int actor) {
  if (actor != kHost) {
    ClockOf(actor);  // before the host's: growing moves the clocks
    Join(ClockOf(actor), ClockOf(kHost));
  }
  return ++ClockOf(actor)[actor];
}

HappensBefore::Clock HappensBefore::Record(int actor) {
  Advance(actor);
  return ClockOf(actor);
}

void HappensBefore::Wait(int actor, const Clock& event) {
  Join(ClockOf(actor), event);
}

void HappensBefore::WaitForAll() {
  Clock all;
  for (const Clock& clock : clocks_) Join(all, clock);
  Join(ClockOf(kHost), all);
}

bool HappensBefore::Knows(int actor, const Visit& visit) {
  const Clock& clock = ClockOf(actor);
  return static_cast<size_t>(visit.actor) < clock.size() &&
         clock[visit.actor] >= visit.time;
}

void HappensBefore::Split(uintptr_t at) {
  auto after = segments_.upper_bound(at);
  if (after == segments_.begin()) return;
  auto segment = std::prev(after);
  if (segment->first == at || segment->second.end <= at) return;
  Segment tail = segment->second;
  segment->second.end = at;
  segments_.emplace_hint(after, at, std::move(tail));
}

void HappensBefore::Report(const Visit& earlier, bool earlier_writes,
                           const Visit& later, bool later_writes,
                           int64_t bytes) {
  std::string race = absl::StrCat(
      *later.what, " on ", ActorName(later.actor),
      later_writes ? " writes" : " reads", " what ", *earlier.what, " on ",
      ActorName(earlier.actor), earlier_writes ? " writes" : " reads", " (",
      bytes, " bytes), and nothing orders the two");
  if (std::find(races_.begin(), races_.end(), race) == races_.end()) {
    races_.push_back(std::move(race));
  }
}

void HappensBefore::Check(const Segment& segment, uintptr_t begin,
                          const Visit& visit, bool writes,
                          const std::vector<int>& spared) {
  const auto bytes = static_cast<int64_t>(segment.end - begin);
  const auto races = [&](const Visit& earlier) {
    return earlier.time > 0 && earlier.actor != visit.actor &&
           !Knows(visit.actor, earlier) &&
           std::none_of(spared.begin(), spared.end(),
                        [&](int actor) { return Knows(actor, earlier); });
  };
  if (races(segment.write)) Report(segment.write, true, visit, writes, bytes);
  if (!writes) return;
  for (const Visit& read : segment.reads) {
    if (races(read)) Report(read, false, visit, writes, bytes);
  }
}

void HappensBefore::Apply(Segment& segment, uintptr_t begin, const Visit& visit,
                          bool writes) {
  Check(segment, begin, visit, writes, {});
  if (writes) {
    segment.write = visit;
    segment.reads.clear();
    return;
  }
  for (Visit& read : segment.reads) {
    if (read.actor == visit.actor) {
      read = visit;
      return;
    }
  }
  segment.reads.push_back(visit);
}

void HappensBefore::Access(int actor, const std::vector<Range>& ranges,
                           bool writes, const std::string& what) {
  const Visit visit{actor, Advance(actor),
                    std::make_shared<const std::string>(what)};
  for (const Range& range : ranges) {
    if (range.begin >= range.end) continue;
    Split(range.begin);
    Split(range.end);
    auto next = segments_.lower_bound(range.begin);
    for (uintptr_t at = range.begin; at < range.end;) {
      if (next == segments_.end() || next->first > at) {
        Segment fresh;
        fresh.end = next == segments_.end() ? range.end
                                            : std::min(range.end, next->first);
        next = segments_.emplace_hint(next, at, std::move(fresh));
      }
      Apply(next->second, at, visit, writes);
      at = next->second.end;
      ++next;
    }
  }
}

void HappensBefore::Free(int actor, Range range, const std::vector<int>& spared,
                         const std::string& what) {
  if (range.begin >= range.end) return;
  const Visit visit{actor, Advance(actor),
                    std::make_shared<const std::string>(what)};
  Split(range.begin);
  Split(range.end);
  const auto end = segments_.lower_bound(range.end);
  for (auto it = segments_.lower_bound(range.begin); it != end; ++it) {
    Check(it->second, it->first, visit, /*writes=*/true, spared);
  }
  Forget(range);
}

void HappensBefore::Forget(Range range) {
  if (range.begin >= range.end) return;
  Split(range.begin);
  Split(range.end);
  segments_.erase(segments_.lower_bound(range.begin),
                  segments_.lower_bound(range.end));
}

void HappensBefore::Reset() {
  segments_.clear();
  races_.clear();
}

}  // namespace fsdp::testing
