#include "examples/gpt/default_text.h"

#include <filesystem>
#include <memory>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tools/cpp/runfiles/runfiles.h"

namespace gpt {

absl::StatusOr<std::string> DefaultText(const std::string& argv0) {
  using ::bazel::tools::cpp::runfiles::Runfiles;
  std::string why;
#ifdef BAZEL_CURRENT_REPOSITORY
  // Under bzlmod the repository has a longer name, which Bazel maps.
  const std::unique_ptr<Runfiles> runfiles(
      Runfiles::Create(argv0, BAZEL_CURRENT_REPOSITORY, &why));
#else
  const std::unique_ptr<Runfiles> runfiles(Runfiles::Create(argv0, &why));
#endif
  if (runfiles != nullptr) {
    std::string folder = runfiles->Rlocation("libtorch/include");
    std::error_code ignored;
    if (std::filesystem::is_directory(folder, ignored)) return folder;
    why = absl::StrCat("no folder ", folder);
  }
  return absl::NotFoundError(
      absl::StrCat("finding the default text, LibTorch's headers: ", why,
                   "; name a text with --data=FILE_OR_FOLDER"));
}

}  // namespace gpt
