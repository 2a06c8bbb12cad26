#include "checkpoint/commit/testing/save_files.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "base/files/checksums.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/files/range_writer.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::RandomBytes;

constexpr int64_t kMaxBytes = int64_t{1} << 24;

}  // namespace

Contents ContentsOf(uint32_t version) {
  return {{"model.safetensors", RandomBytes(9001, 2 * version)},
          {"optimizer/exp_avg.safetensors", RandomBytes(4097, 2 * version + 1)},
          {"trainer.json", absl::StrCat("{\"version\": ", version, "}")}};
}

absl::StatusOr<Manifest> WriteFiles(FileSystem& files,
                                    const std::string& folder, int64_t step,
                                    const Contents& contents, bool in_order) {
  std::vector<std::string> paths;
  std::vector<NamedSize> sizes;
  for (const auto& [name, bytes] : contents) {
    paths.push_back(JoinPath(folder, name));
    sizes.push_back({name, static_cast<int64_t>(bytes.size())});
    if (FolderOf(name) != ".") {
      FSDP_RETURN_IF_ERROR(
          files.MakeFolder(JoinPath(folder, FolderOf(name))).status());
    }
  }
  RangeWriterOptions options;
  options.buffer_bytes = kBlockBytes;
  options.buffers = 2;
  options.in_order = in_order;
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeWriter> writer,
                        RangeWriter::Create(files, paths, options));
  int64_t file = 0;
  for (const auto& [name, bytes] : contents) {
    const auto size = static_cast<int64_t>(bytes.size());
    if (!in_order) FSDP_RETURN_IF_ERROR(writer->SetSize(file, size));
    FSDP_RETURN_IF_ERROR(writer->WriteBytes(file, 0, bytes));
    ++file;
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<FilePiece> pieces, writer->Finish());
  FSDP_ASSIGN_OR_RETURN(const auto sums, CombinePieces(pieces, sizes));
  Manifest manifest;
  manifest.step = step;
  for (size_t i = 0; i < sizes.size(); ++i) {
    manifest.files[sizes[i].name] = sums[i];
  }
  return manifest;
}

absl::Status Save(FileSystem& files, CheckpointFolder& folder, int64_t step,
                  const Contents& contents, bool overwrite) {
  FSDP_ASSIGN_OR_RETURN(const std::string path, folder.Begin(step, overwrite));
  FSDP_ASSIGN_OR_RETURN(const Manifest manifest,
                        WriteFiles(files, path, step, contents,
                                   folder.commit_by() == CommitBy::kManifest));
  return folder.Commit(step, manifest);
}

absl::StatusOr<Contents> Load(FileSystem& files, const std::string& folder) {
  FSDP_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(files, folder));
  FSDP_ASSIGN_OR_RETURN(const std::vector<Problem> problems,
                        VerifyFiles(files, folder, manifest, nullptr));
  FSDP_RETURN_IF_ERROR(ProblemsStatus(folder, problems));
  Contents contents;
  for (const auto& [name, sums] : manifest.files) {
    FSDP_ASSIGN_OR_RETURN(contents[name],
                          ReadFile(files, JoinPath(folder, name), kMaxBytes));
  }
  return contents;
}

std::vector<int64_t> StepsIn(FileSystem& files, const std::string& root) {
  std::vector<int64_t> steps;
  const auto list = ListCheckpoints(files, root);
  EXPECT_OK(list);
  for (const Committed& one : *list) steps.push_back(one.step);
  return steps;
}

int64_t LatestIn(FileSystem& files, const std::string& root) {
  const auto latest = LatestCheckpoint(files, root);
  EXPECT_OK(latest);
  return latest->has_value() ? (*latest)->step : -1;
}

}  // namespace fsdp::checkpoint::testing
