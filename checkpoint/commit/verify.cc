#include "checkpoint/commit/verify.h"

#include <algorithm>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/range_reader.h"

namespace fsdp::checkpoint {
namespace {

using Kind = Problem::Kind;

Problem Make(Kind kind, const std::string& file, absl::string_view what) {
  return {kind, file, absl::StrCat(file, ": ", what)};
}

// Adds all that is in a folder, by name relative to `root`, its subfolders'
// files as well, but not what is deeper.
absl::Status Find(FileSystem& files, const std::string& root,
                  const std::string& inside,
                  std::map<std::string, FileInfo>& found) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files.List(JoinPath(root, inside)));
  for (const std::string& name : names) {
    const std::string relative = inside.empty() ? name : JoinPath(inside, name);
    FSDP_ASSIGN_OR_RETURN(const FileInfo info,
                          files.Stat(JoinPath(root, relative)));
    if (info.kind == FileInfo::Kind::kFolder && inside.empty()) {
      FSDP_RETURN_IF_ERROR(Find(files, root, relative, found));
    } else if (relative != kManifestName && relative != kGivenUpName) {
      found[relative] = info;
    }
  }
  return absl::OkStatus();
}

// Where `blocks`, which may be too few, are not as they should be.
std::vector<Problem> Compare(const std::string& name, const FileSums& expected,
                             const std::vector<Piece>& blocks) {
  std::vector<Problem> problems;
  const auto sound = [&](size_t i) {
    return blocks[i].crc32c == expected.blocks[i];
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (sound(i)) continue;
    const size_t begin = i;
    while (i < blocks.size() && !sound(i)) ++i;
    problems.push_back(
        Make(Kind::kDamaged, name,
             absl::StrCat("MiB [", begin, ", ", i, ") are damaged: CRC32C ",
                          absl::Hex(blocks[begin].crc32c, absl::kZeroPad8),
                          " instead of ",
                          absl::Hex(expected.blocks[begin], absl::kZeroPad8))));
  }
  return problems;
}

}  // namespace

absl::StatusOr<std::vector<Problem>> CompareSizes(FileSystem& files,
                                                  const std::string& folder,
                                                  const Manifest& manifest) {
  std::map<std::string, FileInfo> found;
  FSDP_RETURN_IF_ERROR(Find(files, folder, "", found));
  std::vector<Problem> problems;
  for (const auto& [name, sums] : manifest.files) {
    const auto there = found.find(name);
    if (there == found.end()) {
      problems.push_back(Make(Kind::kMissing, name, "is missing"));
      continue;
    }
    const FileInfo& info = there->second;
    const std::string sizes =
        absl::StrCat("has ", info.bytes, " bytes instead of ", sums.bytes);
    if (info.kind != FileInfo::Kind::kFile) {
      problems.push_back(Make(Kind::kUnreadable, name, "is no file"));
    } else if (info.bytes < sums.bytes) {
      problems.push_back(Make(Kind::kShorter, name, sizes));
    } else if (info.bytes > sums.bytes) {
      problems.push_back(Make(Kind::kLonger, name, sizes));
    }
    found.erase(there);
  }
  for (const auto& [name, info] : found) {
    problems.push_back(Make(Kind::kExtra, name,
                            "is there, and the manifest does not have it"));
  }
  return problems;
}

absl::StatusOr<std::vector<Problem>> VerifyFiles(
    FileSystem& files, const std::string& folder, const Manifest& manifest,
    const std::function<void(int64_t done, int64_t total)>& progress) {
  FSDP_ASSIGN_OR_RETURN(std::vector<Problem> problems,
                        CompareSizes(files, folder, manifest));
  std::vector<std::string> names;
  std::vector<SourceFile> sources;
  int64_t total = 0;
  for (const auto& [name, sums] : manifest.files) {
    const auto is_it = [&name = name](const Problem& p) {
      return p.file == name;
    };
    if (std::any_of(problems.begin(), problems.end(), is_it)) continue;
    names.push_back(name);
    // Without its checksums, as every wrong one is wanted.
    sources.push_back({JoinPath(folder, name), nullptr});
    total += sums.bytes;
  }
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeReader> reader,
                        RangeReader::Create(files, sources, {}));
  int64_t done = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const FileSums& sums = manifest.files.at(names[i]);
    std::vector<Piece> blocks;
    const auto take = [&](size_t, int64_t position,
                          absl::Span<const char> bytes) {
      AppendPieces(0, position, {bytes.data(), bytes.size()}, blocks);
      done += static_cast<int64_t>(bytes.size());
      if (progress) progress(done, total);
      return absl::OkStatus();
    };
    const ReadRange whole = {static_cast<int64_t>(i), 0, sums.bytes};
    const absl::Status status = reader->Read({whole}, take);
    if (!status.ok()) {
      problems.push_back(Make(Kind::kUnreadable, names[i], status.message()));
    }
    const std::vector<Problem> more = Compare(names[i], sums, blocks);
    if (status.ok()) problems.insert(problems.end(), more.begin(), more.end());
  }
  return problems;
}

absl::Status ProblemsStatus(absl::string_view folder,
                            const std::vector<Problem>& problems) {
  if (problems.empty()) return absl::OkStatus();
  std::string text = absl::StrCat(folder, ": it is not what its manifest says");
  for (const Problem& problem : problems) {
    absl::StrAppend(&text, "\n  ", problem.text);
  }
  return absl::DataLossError(absl::StrCat(text, "\nLoad an older checkpoint."));
}

}  // namespace fsdp::checkpoint
