#include "fsdp/choose/step_profile.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/check.h"

namespace fsdp {
namespace {

// The straight line through what 1 and 2 rows take, at `rows`.
double Line(double one, double two, int64_t rows) {
  return std::max(0.0, one + (two - one) * static_cast<double>(rows - 1));
}
int64_t Line(int64_t one, int64_t two, int64_t rows) {
  return std::max<int64_t>(0, one + (two - one) * (rows - 1));
}

// The outermost region around `unit`, a unit; -1: none.
int RegionAround(const UnitMembership& membership, int unit) {
  int region = -1;
  for (; unit >= 0; unit = membership.parents[unit]) {
    if (membership.recomputed[unit]) region = unit;
  }
  return region;
}

bool GoTheSameWay(const StepProfile& one, const StepProfile& two) {
  return std::equal(one.forward.begin(), one.forward.end(), two.forward.begin(),
                    two.forward.end(),
                    [](const ModuleVisit& a, const ModuleVisit& b) {
                      return a.module == b.module;
                    });
}

// The memory of a backward, visit after visit from the last on.
class BackwardMemory {
 public:
  BackwardMemory(const StepProfile& profile, const UnitMembership& membership,
                 const std::vector<int64_t>& gradients)
      : profile_(profile),
        membership_(membership),
        gradients_(gradients),
        regions_(membership.parents.size()),
        held_(membership.parents.size()),
        left_(membership.parents.size()) {
    for (const ModuleVisit& visit : profile.forward) AddForward(visit);
  }

  int64_t Peak() {
    int64_t peak = live_;
    for (auto visit = profile_.forward.rbegin();
         visit != profile_.forward.rend(); ++visit) {
      const int unit = membership_.unit_of[visit->module];
      OpenRegion(RegionAround(membership_, unit));
      // All uses of a parameter add to one gradient.
      live_ += gradients_[visit->module];
      held_[unit] += std::exchange(gradients_[visit->module], 0);
      peak = std::max(peak, live_);
      live_ -= visit->saved;
      Leave(unit);
    }
    return peak + profile_.working;
  }

 private:
  struct Region {
    bool entered = false;
    int64_t input = 0;
    int64_t saved = 0;
    bool open = false;
  };

  void AddForward(const ModuleVisit& visit) {
    const int unit = membership_.unit_of[visit.module];
    for (int each = unit; each >= 0; each = membership_.parents[each]) {
      ++left_[each];
    }
    const int around = RegionAround(membership_, unit);
    if (around < 0) {
      live_ += visit.saved;
      return;
    }
    Region& region = regions_[around];
    region.saved += visit.saved;
    if (std::exchange(region.entered, true)) return;
    region.input = visit.input;
    live_ += visit.input;
  }

  void OpenRegion(int unit) {
    if (unit < 0 || std::exchange(regions_[unit].open, true)) return;
    live_ += regions_[unit].saved;
  }

  // Units of which this was the last visit are reduced.
  void Leave(int unit) {
    for (; unit >= 0; unit = membership_.parents[unit]) {
      if (--left_[unit] > 0) continue;
      live_ -= std::exchange(held_[unit], 0);
      if (membership_.recomputed[unit]) live_ -= regions_[unit].input;
    }
  }

  const StepProfile& profile_;
  const UnitMembership& membership_;
  std::vector<int64_t> gradients_;  // by module, what is still to come
  std::vector<Region> regions_;     // by unit
  std::vector<int64_t> held_;       // gradients, by unit
  std::vector<int> left_;           // visits of a unit and those inside
  int64_t live_ = 0;
};

}  // namespace

double StepProfile::forward_seconds() const {
  double sum = 0;
  for (const ModuleVisit& visit : forward) sum += visit.seconds;
  return sum;
}

int64_t StepProfile::saved() const {
  int64_t sum = 0;
  for (const ModuleVisit& visit : forward) sum += visit.saved;
  return sum;
}

StepProfile Extrapolate(const StepProfile& one, const StepProfile& two,
                        int64_t rows) {
  const bool same = GoTheSameWay(one, two);
  StepProfile result = two;
  // Through 0 and 2 rows where 1 row says nothing about them.
  const auto at = [&](auto of_one, auto of_two) {
    return same ? Line(of_one, of_two, rows) : Line(of_two / 2, of_two, rows);
  };
  for (size_t i = 0; i < two.forward.size(); ++i) {
    const ModuleVisit& a = same ? one.forward[i] : two.forward[i];
    const ModuleVisit& b = two.forward[i];
    ModuleVisit& visit = result.forward[i];
    visit.seconds = at(a.seconds, b.seconds);
    visit.saved = at(a.saved, b.saved);
    visit.input = at(a.input, b.input);
  }
  result.backward_seconds = at(one.backward_seconds, two.backward_seconds);
  result.working = at(one.working, two.working);
  return result;
}

std::string ToText(const StepProfile& profile) {
  std::string text =
      absl::StrFormat("%a %d", profile.backward_seconds, profile.working);
  for (const ModuleVisit& visit : profile.forward) {
    absl::StrAppendFormat(&text, " %d %a %d %d", visit.module, visit.seconds,
                          visit.saved, visit.input);
  }
  return text;
}

absl::StatusOr<StepProfile> ProfileFromText(absl::string_view text) {
  constexpr size_t kOfStep = 2;
  constexpr size_t kOfVisit = 4;
  const std::vector<std::string> words = absl::StrSplit(text, ' ');
  bool ok = words.size() >= kOfStep && (words.size() - kOfStep) % kOfVisit == 0;
  size_t next = 0;
  // Abseil reads no hexadecimal numbers of floating point.
  const auto read_seconds = [&](double& seconds) {
    char* end = nullptr;
    seconds = std::strtod(words[next].c_str(), &end);
    ok &= !words[next].empty() && *end == '\0';
    ++next;
  };
  const auto read = [&](auto& number) {
    ok &= absl::SimpleAtoi(words[next++], &number);
  };
  StepProfile profile;
  if (ok) {
    read_seconds(profile.backward_seconds);
    read(profile.working);
  }
  while (ok && next < words.size()) {
    ModuleVisit& visit = profile.forward.emplace_back();
    read(visit.module);
    read_seconds(visit.seconds);
    read(visit.saved);
    read(visit.input);
  }
  if (ok) return profile;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text.substr(0, 40), "\" is no profile of a step"));
}

std::vector<UnitSeconds> ByUnit(const StepProfile& profile,
                                const UnitMembership& membership) {
  const size_t count = membership.parents.size();
  std::vector<UnitSeconds> units(count);
  std::vector<bool> has_children_behind(count);
  for (const ModuleVisit& visit : profile.forward) {
    const int index = membership.unit_of[visit.module];
    units[index].forward += visit.seconds;
    if (!has_children_behind[index]) units[index].share_before += visit.seconds;
    int around = membership.parents[index];
    for (; around >= 0; around = membership.parents[around]) {
      has_children_behind[around] = true;
    }
  }
  const double forward = profile.forward_seconds();
  for (int i = 0; i < static_cast<int>(count); ++i) {
    UnitSeconds& unit = units[i];
    if (unit.forward == 0) continue;
    unit.share_before /= unit.forward;
    unit.backward = profile.backward_seconds * unit.forward / forward;
    if (RegionAround(membership, i) >= 0) unit.backward += unit.forward;
  }
  return units;
}

int64_t ActivationBytes(const StepProfile& profile,
                        const UnitMembership& membership,
                        const std::vector<int64_t>& gradients) {
  FSDP_CHECK(gradients.size() == membership.unit_of.size());
  return BackwardMemory(profile, membership, gradients).Peak();
}

}  // namespace fsdp
