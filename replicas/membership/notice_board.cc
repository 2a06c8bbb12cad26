#include "replicas/membership/notice_board.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

constexpr char kCount[] = "membership/notices";
// How many are read at once; more wait for the entry after.
constexpr int64_t kMostAtOnce = 4096;

std::string KeyOf(int64_t number) {
  return absl::StrCat("membership/notice/", number);
}

}  // namespace

absl::StatusOr<int64_t> NoticeBoard::Reserve() {
  return registers_->Add(kCount, 1);
}

absl::Status NoticeBoard::Write(int64_t number, const Notice& notice) {
  return registers_->Set(KeyOf(number), Encode(notice));
}

absl::StatusOr<NoticeBoard::Pending> NoticeBoard::ReadAfter(int64_t after) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                        registers_->Get(kCount));
  int64_t count = 0;
  if (text.has_value() && !absl::SimpleAtoi(*text, &count)) {
    return absl::InvalidArgumentError(absl::StrCat(kCount, " is no number"));
  }
  if (count < after) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the keeper of the replicas' log has lost what it kept: ", count,
        " notices, of which ", after,
        " were read before. The run cannot go on with it"));
  }
  known_.erase(known_.begin(), known_.upper_bound(after));
  Pending pending;
  pending.seen = std::min(count, after + kMostAtOnce);
  for (int64_t number = after + 1; number <= pending.seen; ++number) {
    if (known_.find(number) == known_.end()) {
      FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> written,
                            registers_->Get(KeyOf(number)));
      const absl::StatusOr<Notice> notice = DecodeNotice(written.value_or(""));
      if (!notice.ok()) continue;
      known_.emplace(number, *notice);
    }
    pending.notices.push_back(known_.at(number));
  }
  return pending;
}

void NoticeBoard::Forget(int64_t after, int64_t seen) {
  for (int64_t number = after + 1; number <= seen; ++number) {
    registers_->Remove(KeyOf(number)).IgnoreError();
  }
}

}  // namespace fsdp::replicas
