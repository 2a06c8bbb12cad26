#include "examples/gpt/data.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tools/cpp/runfiles/runfiles.h"

namespace gpt {

namespace fs = std::filesystem;

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
    if (fs::is_directory(folder, ignored)) return folder;
    why = absl::StrCat("no folder ", folder);
  }
  return absl::NotFoundError(
      absl::StrCat("finding the default text, LibTorch's headers: ", why,
                   "; name a text with --data=FILE_OR_FOLDER"));
}

absl::StatusOr<torch::Tensor> ReadText(const std::string& path, int64_t seq) {
  std::vector<std::string> files = {path};
  std::error_code error;
  if (fs::is_directory(path, error)) {
    files.clear();
    auto entry = fs::recursive_directory_iterator(path, error);
    for (; !error && entry != fs::recursive_directory_iterator();
         entry.increment(error)) {
      std::error_code ignored;  // a link to nothing is no file
      if (entry->is_regular_file(ignored)) files.push_back(entry->path());
    }
    std::sort(files.begin(), files.end());
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("--data=", path));
  }
  std::string text;
  for (const std::string& file : files) {
    std::ifstream in(file, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), {});
    if (!in) return absl::NotFoundError(absl::StrCat("cannot read ", file));
    if (bytes.find('\0') == std::string::npos) text += bytes;
  }
  const auto size = static_cast<int64_t>(text.size());
  if (size <= seq) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data=", path, " has ", size,
                     " bytes of text: --seq=", seq, " needs more"));
  }
  torch::Tensor tensor = torch::empty({size}, torch::kByte);
  std::memcpy(tensor.mutable_data_ptr(), text.data(), text.size());
  return tensor;
}

Batch BatchOf(const torch::Tensor& text, int64_t step, const Share& share) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(step);
  const torch::Tensor starts =
      torch::randint(text.numel() - share.seq, {share.ranks * share.rows},
                     generator, torch::kLong)
          .narrow(0, share.rank * share.rows, share.rows);
  const torch::Tensor windows =
      text.index({starts.unsqueeze(1) + torch::arange(share.seq + 1)})
          .to(torch::kLong);
  return {windows.slice(/*dim=*/1, 0, share.seq), windows.slice(1, 1)};
}

}  // namespace gpt
