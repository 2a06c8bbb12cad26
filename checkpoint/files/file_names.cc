#include "checkpoint/files/file_names.h"

#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {

absl::Status CheckPlainFileName(absl::string_view name) {
  constexpr size_t kMaxBytes = 255;
  constexpr absl::string_view kForbidden("/\\\0", 3);
  if (!name.empty() && name != "." && name != ".." &&
      name.size() <= kMaxBytes &&
      name.find_first_of(kForbidden) == absl::string_view::npos) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", absl::Utf8SafeCEscape(name.substr(0, kMaxBytes)),
                   "\" is no name of a file in the checkpoint's own folder"));
}

absl::Status CheckRelativePath(absl::string_view path) {
  constexpr size_t kMaxBytes = 4096;
  if (path.size() > kMaxBytes) {
    return absl::InvalidArgumentError("a path of more than 4096 bytes");
  }
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    FSDP_RETURN_IF_ERROR(CheckPlainFileName(part));
  }
  return absl::OkStatus();
}

absl::string_view FolderPart(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? "" : path.substr(0, slash + 1);
}

absl::string_view LastPart(absl::string_view path) {
  return path.substr(FolderPart(path).size());
}

}  // namespace fsdp::checkpoint
