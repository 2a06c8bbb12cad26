#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "planner/choose/choose_options.h"

namespace fsdp {
namespace {

double MiB(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::string Verdict(const Candidate& each, const Candidate* chosen,
                    int64_t memory_bytes) {
  if (&each == chosen) return "chosen";
  if (!each.refused.empty()) return each.refused;
  if (!each.Fits(memory_bytes)) {
    return absl::StrFormat("lacks %.2f MiB", MiB(each.bytes() - memory_bytes));
  }
  if (chosen == nullptr) return "fits";
  const double slower = each.seconds / chosen->seconds - 1;
  if (slower > kSameSpeed) {
    return absl::StrFormat("slower by %.0f %%", 100 * slower);
  }
  const int64_t more = each.bytes() - chosen->bytes();
  if (more > 0) {
    return absl::StrFormat("no faster, %.2f MiB more", MiB(more));
  }
  return more < 0 ? "slower" : "the same";
}

// Returns whether `a` and `b` are alike but for strategy and prefetching.
bool AreAlike(const Candidate& a, const Candidate& b) {
  return a.units == b.units && a.recompute == b.recompute &&
         a.rests == b.rests && a.refused == b.refused &&
         a.seconds == b.seconds && a.activations == b.activations &&
         a.plan.total() == b.plan.total();
}

}  // namespace

absl::StatusOr<int> ChooseCandidate(absl::Span<const Candidate> candidates,
                                    int64_t memory_bytes) {
  int chosen = -1;  // the fastest at first
  const Candidate* smallest = nullptr;
  for (int i = 0; i < static_cast<int>(candidates.size()); ++i) {
    const Candidate& each = candidates[i];
    if (!each.refused.empty()) continue;
    if (smallest == nullptr || each.bytes() < smallest->bytes()) {
      smallest = &each;
    }
    if (!each.Fits(memory_bytes)) continue;
    if (chosen < 0 || each.seconds < candidates[chosen].seconds) chosen = i;
  }
  if (smallest == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "none of ", candidates.size(), " combinations of options is possible: ",
        candidates.empty() ? "" : candidates.front().refused));
  }
  if (chosen < 0) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "none of %d combinations of options fits %.2f MiB: the smallest (%s, "
        "%s%s, resting in %s) takes %.2f MiB, %.2f of them activations and "
        "gradients under way, and lacks %.2f MiB (%d bytes). Allow more "
        "memory, take fewer rows or more ranks, let smaller modules be units, "
        "or name a directory on an SSD",
        candidates.size(), MiB(memory_bytes), smallest->units,
        smallest->strategy, smallest->recompute ? ", recomputed" : "",
        smallest->rests, MiB(smallest->bytes()), MiB(smallest->activations),
        MiB(smallest->bytes() - memory_bytes),
        smallest->bytes() - memory_bytes));
  }
  const double limit = candidates[chosen].seconds * (1 + kSameSpeed);
  for (int i = 0; i < static_cast<int>(candidates.size()); ++i) {
    const Candidate& each = candidates[i];
    if (!each.Fits(memory_bytes) || each.seconds > limit) continue;
    if (std::make_pair(each.bytes(), i) <
        std::make_pair(candidates[chosen].bytes(), chosen)) {
      chosen = i;
    }
  }
  return chosen;
}

std::string TableOf(absl::Span<const Candidate> candidates, int chosen,
                    int64_t memory_bytes, int max_lines) {
  // The chosen candidate, those that fit, those that do not and those that were
  // refused, each from the best on.
  std::vector<int> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int i) {
    const Candidate& each = candidates[i];
    const int group = i == chosen               ? 0
                      : each.Fits(memory_bytes) ? 1
                      : each.refused.empty()    ? 2
                                                : 3;
    return std::make_tuple(
        group, group == 2 ? static_cast<double>(each.bytes()) : each.seconds,
        i);
  };
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return key(a) < key(b); });
  struct Line {
    int candidate;
    int others = 0;  // candidates like this one
  };
  std::vector<Line> lines;
  for (const int i : order) {
    const auto alike =
        std::find_if(lines.begin(), lines.end(), [&](const Line& line) {
          return AreAlike(candidates[line.candidate], candidates[i]);
        });
    if (alike == lines.end()) {
      lines.push_back({i});
    } else {
      ++alike->others;
    }
  }
  std::string text = absl::StrFormat(
      "%-14s %-30s %-8s %-9s %-7s %9s %10s %11s %10s  of %.2f MiB\n", "units",
      "strategy", "prefetch", "recompute", "rests", "step ms", "plan MiB",
      "activations", "together", MiB(memory_bytes));
  const Candidate* const taken = chosen < 0 ? nullptr : &candidates[chosen];
  int left = static_cast<int>(candidates.size());
  for (const Line& line : lines) {
    if (&line - lines.data() == max_lines) break;
    const Candidate& each = candidates[line.candidate];
    absl::StrAppendFormat(
        &text, "%-14s %-30s %-8s %-9s %-7s %9.2f %10.2f %11.2f %10.2f  %s",
        each.units, each.strategy, each.prefetch ? "yes" : "no",
        each.recompute ? "yes" : "no", each.rests, 1e3 * each.seconds,
        MiB(each.plan.total()), MiB(each.activations), MiB(each.bytes()),
        Verdict(each, taken, memory_bytes));
    if (line.others > 0) {
      absl::StrAppend(&text, ", as ", line.others,
                      line.others == 1 ? " other" : " others");
    }
    absl::StrAppend(&text, "\n");
    left -= 1 + line.others;
  }
  if (left > 0) absl::StrAppend(&text, "and ", left, " more\n");
  return text;
}

}  // namespace fsdp
