// Reads, under libFuzzer, what replicas and their keeper may send and a file of
// history. Flags of libFuzzer, such as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //replicas/membership/testing:text_fuzz -- DIR
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

// Counts beyond this are read, but not raised further.
constexpr int64_t kFar = int64_t{1} << 61;

void CheckMade(const Roster& roster) {
  const absl::StatusOr<Roster> again = DecodeRoster(Encode(roster));
  FSDP_CHECK(again.ok() && Encode(*again) == Encode(roster));
}

// Applies the rules to a roster and these notices.
void CheckRules(const Roster& roster, const std::vector<Notice>& notices) {
  const int64_t seen =
      roster.notices_seen + static_cast<int64_t>(notices.size());
  if (roster.members.empty()) {
    if (!Waiting(notices).empty()) CheckMade(Found(roster, notices, seen));
    return;
  }
  CheckMade(AfterStep(roster, notices, seen));
  const std::vector<ReplicaId> gone = Gone(roster, notices);
  if (!gone.empty()) CheckMade(Without(roster, gone));
}

// Reads a roster, and a notice from each line after it.
void CheckLog(absl::string_view text) {
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  const absl::string_view first = lines.empty() ? text : lines[0];
  const absl::StatusOr<Roster> roster = DecodeRoster(first);
  FSDP_CHECK(!roster.ok() || Encode(*roster) == first);
  std::vector<Notice> notices;
  for (const absl::string_view line : lines) {
    const absl::StatusOr<Notice> notice = DecodeNotice(line);
    if (!notice.ok()) continue;
    FSDP_CHECK(Encode(*notice) == line);
    notices.push_back(*notice);
  }
  if (roster.ok() &&
      std::max({roster->number, roster->step, roster->notices_seen}) < kFar) {
    CheckRules(*roster, notices);
  }
}

// A replay here has at most so many entries.
constexpr int kMaxEntries = 200;

void CheckReplay(const History& history) {
  Roster roster = FirstEntry(history);
  for (int i = 0; i < kMaxEntries; ++i) {
    const Roster next = EntryAfter(history, roster);
    FSDP_CHECK(next.number == roster.number + 1);
    FSDP_CHECK((next.cause == Cause::kLost) == (next.step == roster.step));
    roster = next;
  }
}

void CheckHistory(absl::string_view text) {
  const absl::StatusOr<History> history =
      ParseHistory({{"file", std::string(text)}});
  if (!history.ok() || history->empty()) return;
  std::string written;
  for (const auto& [epoch, span] : *history) written += ToLine(span) + "\n";
  const absl::StatusOr<History> again =
      ParseHistory({{"file", written}, {"other", std::string(text)}});
  FSDP_CHECK(again.ok() && *again == *history);
  CheckReplay(*history);
}

}  // namespace
}  // namespace fsdp::replicas

// Reads the bytes in each of these ways. Stops the program if what was read is
// not written the same, or the rules make something of it that cannot be read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  fsdp::replicas::CheckLog(text);
  fsdp::replicas::CheckHistory(text);
  return 0;
}
