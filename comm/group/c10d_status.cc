#include "comm/group/c10d_status.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/torch_status.h"

namespace fsdp::comm {
namespace {

// Removes "[/path/to/pair.cc:547] " and the C++ stack that follows the first
// line.
std::string Shortened(absl::string_view message) {
  std::string text(message.substr(0, message.find('\n')));
  const size_t begin = text.find("[/");
  const size_t end = text.find("] ", begin);
  if (end != std::string::npos) text.erase(begin, end + 2 - begin);
  return text;
}

}  // namespace

absl::Status ConnectionError(const absl::Status& status) {
  return absl::UnavailableError(Shortened(status.message()));
}

absl::Status C10dToStatus(absl::string_view what, FallibleRef fn) {
  absl::Status status = TorchToStatus(what, fn);
  if (status.ok()) return status;
  if (absl::IsUnknown(status)) return ConnectionError(status);
  const std::string text = Shortened(status.message());
  // c10d::Backend says so itself.
  if (absl::IsInternal(status) && absl::StrContains(text, "does not support")) {
    return absl::UnimplementedError(text);
  }
  return absl::Status(status.code(), text);
}

}  // namespace fsdp::comm
