#include "comm/group/status_text.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

std::string EncodeStatus(const absl::Status& status) {
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message());
}

std::optional<absl::Status> DecodeStatus(absl::string_view text) {
  const size_t end = text.find(' ');
  int code = 0;
  if (end == absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(0, end), &code) ||
      code < static_cast<int>(absl::StatusCode::kOk) ||
      code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    return std::nullopt;
  }
  return absl::Status(static_cast<absl::StatusCode>(code),
                      text.substr(end + 1));
}

}  // namespace fsdp::comm
