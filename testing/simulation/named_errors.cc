#include "testing/simulation/named_errors.h"

#include <algorithm>
#include <initializer_list>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "testing/simulation/rank_training.h"

namespace fsdp::simulation {
namespace {

constexpr absl::string_view kTooLate = "not done at the deadline";

bool Has(absl::string_view text,
         std::initializer_list<absl::string_view> parts) {
  return std::all_of(parts.begin(), parts.end(), [text](absl::string_view p) {
    return absl::StrContains(text, p);
  });
}

// Returns whether `text` says that others miss the rank: it is gone, has given
// up, or has not come. `rank` is its number in the world, which may differ from
// that in its group, as in "rank 1 (world rank 5)".
bool NamesLostRank(absl::string_view text, int rank) {
  const std::string name = absl::StrCat(
      "(\\brank ", rank, "\\b(?! \\(world rank )|\\(world rank ", rank,
      "\\))( \\((last seen in|no call so far)[^()]*(\\(\\))?\\))?");
  return std::regex_search(
      text.begin(), text.end(),
      std::regex(absl::StrCat(name, " (is gone|aborted:|gave up waiting for)|",
                              "still missing: [^;\n]*", name)));
}

bool HasDamage(const absl::Status& error) {
  return absl::IsDataLoss(error) || Has(error.message(), {"CRC32C"});
}

}  // namespace

bool IsNamedBy(const Fault& fault, const absl::Status& error) {
  const absl::string_view text = error.message();
  switch (fault.kind) {
    case FaultKind::kKill:
    case FaultKind::kSilence:
    case FaultKind::kFinish:
      return NamesLostRank(text, fault.rank);
    case FaultKind::kLongStop:
      return NamesLostRank(text, fault.rank) || Has(text, {kTooLate}) ||
             Has(text, {absl::StrCat("rank ", fault.rank,
                                     " has waited for its disk for ")});
    case FaultKind::kClockJump:
      return Has(text, {kTooLate});
    case FaultKind::kThrow:
      return Has(text, {kUsersError}) || NamesLostRank(text, fault.rank);
    case FaultKind::kDiskFull:
      return Has(text, {"/run", "No space left on device"});
    case FaultKind::kDiskError:
      return Has(text, {"/run", "Input/output error"});
    case FaultKind::kRot:
      return Has(text, {"/run"}) && HasDamage(error);
    case FaultKind::kSsdError:
      return Has(text, {"/ssd", "Input/output error"});
    case FaultKind::kSsdTorn:
      return Has(text, {"/ssd"}) && HasDamage(error);
    case FaultKind::kSsdShort:
      return Has(text, {"/ssd"}) &&
             (Has(text, {"bytes were written"}) || Has(text, {"ends after"}));
    case FaultKind::kNotFinite:
      return Has(text,
                 {absl::StrCat("the loss of rank ", fault.rank, " is nan")});
    case FaultKind::kSignal:
      return Has(text, {"stopped by signal 15"});
    case FaultKind::kStop:
    case FaultKind::kSlow:
    case FaultKind::kLosePower:
      return false;  // nobody has to notice, or nobody is left who could
  }
  return false;
}

std::vector<int> RanksThatSayNothing(const std::vector<Fault>& faults,
                                     const std::vector<absl::Status>& ends) {
  std::vector<int> silent;
  std::vector<int> lost;
  for (int rank = 0; rank < static_cast<int>(ends.size()); ++rank) {
    if (ends[rank].ok()) continue;
    const bool tells = std::any_of(
        faults.begin(), faults.end(),
        [&](const Fault& fault) { return IsNamedBy(fault, ends[rank]); });
    (tells ? lost : silent).push_back(rank);
  }
  // A rank whose error names a lost rank counts as lost, too.
  for (size_t i = 0; i < lost.size(); ++i) {
    const auto told =
        std::stable_partition(silent.begin(), silent.end(), [&](int rank) {
          return !NamesLostRank(ends[rank].message(), lost[i]);
        });
    lost.insert(lost.end(), told, silent.end());
    silent.erase(told, silent.end());
  }
  return silent;
}

}  // namespace fsdp::simulation
