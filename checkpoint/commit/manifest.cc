#include "checkpoint/commit/manifest.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/files/range_reader.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kFormat = "libtorch_fsdp checkpoint";
constexpr int64_t kVersion = 1;
// Enough for a checkpoint of 64 TiB and the names of its files.
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

constexpr absl::string_view kBeforeSum = ", \"crc32c\": \"";
constexpr absl::string_view kAfterSum = "\"}\n";
constexpr size_t kDigits = 8;

std::string Hex(uint32_t sum) {
  return absl::StrCat(absl::Hex(sum, absl::kZeroPad8));
}

absl::Status Bad(absl::string_view path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(
      path, ": ", why,
      "; the manifest is damaged or not ours; load an older checkpoint"));
}

Json ToJson(const FileSums& sums) {
  std::string blocks;
  blocks.reserve(sums.blocks.size() * kDigits);
  for (const uint32_t sum : sums.blocks) {
    absl::StrAppend(&blocks, absl::Hex(sum, absl::kZeroPad8));
  }
  return Json::Object{{"bytes", sums.bytes},
                      {"crc32c", Hex(sums.crc32c)},
                      {"blocks", std::move(blocks)}};
}

absl::StatusOr<FileSums> ParseSums(const Json& value, absl::string_view name,
                                   absl::string_view path) {
  const auto* const bytes = value.FindAs<int64_t>("bytes");
  const auto* const blocks = value.FindAs<std::string>("blocks");
  FileSums sums;
  if (bytes != nullptr && *bytes >= 0 && blocks != nullptr &&
      static_cast<int64_t>(blocks->size() / kDigits) == BlocksOf(*bytes)) {
    sums.bytes = *bytes;
    sums.blocks.resize(blocks->size() / kDigits);
    // What is none of our digits gives other ones.
    for (size_t i = 0; i < sums.blocks.size(); ++i) {
      std::ignore = absl::SimpleHexAtoi(blocks->substr(i * kDigits, kDigits),
                                        &sums.blocks[i]);
    }
    sums.crc32c = CombineBlocks(sums.bytes, sums.blocks);
    if (value == ToJson(sums)) return sums;
  }
  return Bad(path, absl::StrCat("file \"", name,
                                "\": its members are not bytes, eight digits "
                                "of crc32c that fit its blocks, and eight "
                                "digits of blocks for each MiB"));
}

absl::Status CheckSum(absl::string_view text, absl::string_view path) {
  const size_t suffix = kBeforeSum.size() + kDigits + kAfterSum.size();
  const absl::string_view body =
      text.substr(0, std::max(text.size(), suffix) - suffix);
  const std::string sum = Hex(Crc32c(body));
  if (text.substr(body.size()) == absl::StrCat(kBeforeSum, sum, kAfterSum)) {
    return absl::OkStatus();
  }
  return Bad(path, absl::StrCat("it does not end with its CRC32C, ", sum));
}

absl::Status CheckHead(const Json& json, absl::string_view path) {
  const auto* const name = json.FindAs<std::string>("format");
  if (name == nullptr || *name != kFormat) {
    return Bad(path, absl::StrCat("its format is not \"", kFormat, "\""));
  }
  const auto* const version = json.FindAs<int64_t>("version");
  if (version == nullptr) return Bad(path, "it has no version");
  if (*version != kVersion) {
    return absl::UnimplementedError(absl::StrCat(
        path, ": it is of version ", *version, ", and version ", kVersion,
        " is what can be read; load it with a newer program"));
  }
  // The checksum is one of them.
  if (json.As<Json::Object>()->size() != 6) {
    return Bad(path, "it has other members than version 1 has");
  }
  const auto* const block = json.FindAs<int64_t>("block_bytes");
  if (block == nullptr || *block != kBlockBytes) {
    return Bad(path, absl::StrCat("its block_bytes are not ", kBlockBytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckFileName(absl::string_view name) {
  const std::vector<absl::string_view> parts = absl::StrSplit(name, '/');
  const bool is_control = absl::c_any_of(
      name, [](unsigned char c) { return absl::ascii_iscntrl(c); });
  const bool are_plain = absl::c_all_of(
      parts, [](absl::string_view part) { return IsPlainFileName(part); });
  if (name.size() <= kMaxNameBytes && parts.size() <= 2 && !is_control &&
      are_plain && name != kManifestName && name != kGivenUpName) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", absl::CHexEscape(name.substr(0, kMaxNameBytes)),
      "\" is no file of a checkpoint, which is in its folder or in one there"));
}

std::string FormatManifest(const Manifest& manifest) {
  Json::Object files;
  for (const auto& [name, sums] : manifest.files) {
    files.emplace_back(name, ToJson(sums));
  }
  std::string text = Json(Json::Object{{"format", kFormat},
                                       {"version", kVersion},
                                       {"step", manifest.step},
                                       {"block_bytes", kBlockBytes},
                                       {"files", std::move(files)}})
                         .ToString();
  text.pop_back();  // the sum goes before the '}'
  const std::string sum = Hex(Crc32c(text));
  return absl::StrCat(text, kBeforeSum, sum, kAfterSum);
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view path) {
  if (static_cast<int64_t>(text.size()) > kMaxManifestBytes) {
    return Bad(path, "it is larger than any manifest");
  }
  FSDP_RETURN_IF_ERROR(CheckSum(text, path));
  const absl::StatusOr<Json> json = Json::Parse(text);
  if (!json.ok()) return Bad(path, json.status().message());
  FSDP_RETURN_IF_ERROR(CheckHead(*json, path));
  const auto* const step = json->FindAs<int64_t>("step");
  const auto* const files = json->FindAs<Json::Object>("files");
  if (step == nullptr || *step < 0) return Bad(path, "its step is no number");
  if (files == nullptr) return Bad(path, "its files are no object");
  Manifest manifest;
  manifest.step = *step;
  for (const auto& [name, value] : *files) {
    const absl::Status valid = CheckFileName(name);
    if (!valid.ok()) return Bad(path, valid.message());
    FSDP_ASSIGN_OR_RETURN(manifest.files[name], ParseSums(value, name, path));
  }
  return manifest;
}

absl::StatusOr<Manifest> ReadManifest(FileSystem& files,
                                      const std::string& folder) {
  const std::string path = JoinPath(folder, kManifestName);
  FSDP_ASSIGN_OR_RETURN(const std::string text,
                        ReadFile(files, path, kMaxManifestBytes));
  return ParseManifest(text, path);
}

namespace {

Problem Make(const std::string& file, absl::string_view what) {
  return {file, absl::StrCat(file, ": ", what)};
}

// Adds everything in a folder and in its subfolders, but nothing deeper, by
// name relative to `root`.
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

// Adds where `blocks` differ from `expected`.
void Compare(const std::string& name, const FileSums& expected,
             const std::vector<FilePiece>& blocks,
             std::vector<Problem>& problems) {
  const auto sound = [&](size_t i) {
    return blocks[i].crc32c == expected.blocks[i];
  };
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (sound(i)) continue;
    const size_t begin = i;
    while (i < blocks.size() && !sound(i)) ++i;
    problems.push_back(Make(
        name, absl::StrCat("MiB [", begin, ", ", i, ") are damaged: CRC32C ",
                           Hex(blocks[begin].crc32c), " instead of ",
                           Hex(expected.blocks[begin]))));
  }
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
      problems.push_back(Make(name, "is missing"));
      continue;
    }
    const FileInfo& info = there->second;
    if (info.kind != FileInfo::Kind::kFile) {
      problems.push_back(Make(name, "is no file"));
    } else if (info.bytes != sums.bytes) {
      problems.push_back(Make(
          name,
          absl::StrCat("has ", info.bytes, " bytes instead of ", sums.bytes)));
    }
    found.erase(there);
  }
  for (const auto& [name, info] : found) {
    problems.push_back(
        Make(name, "is there, and the manifest does not have it"));
  }
  return problems;
}

absl::StatusOr<std::vector<Problem>> VerifyFiles(
    FileSystem& files, const std::string& folder, const Manifest& manifest,
    const std::function<void(int64_t done, int64_t total)>& progress) {
  FSDP_ASSIGN_OR_RETURN(auto problems, CompareSizes(files, folder, manifest));
  std::vector<std::string> names;
  std::vector<SourceFile> sources;
  int64_t total = 0;
  for (const auto& [name, sums] : manifest.files) {
    const auto is_it = [&name = name](const Problem& p) {
      return p.file == name;
    };
    if (std::any_of(problems.begin(), problems.end(), is_it)) continue;
    names.push_back(name);
    // The reader gets no checksums, since it would stop at the first wrong one.
    sources.push_back({JoinPath(folder, name), nullptr});
    total += sums.bytes;
  }
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeReader> reader,
                        RangeReader::Create(files, sources, {}));
  int64_t done = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const FileSums& sums = manifest.files.at(names[i]);
    std::vector<FilePiece> blocks;
    const auto take = [&](size_t, int64_t position,
                          absl::Span<const char> bytes) {
      AppendPieces(0, position, {bytes.data(), bytes.size()}, blocks);
      done += static_cast<int64_t>(bytes.size());
      if (progress) progress(done, total);
      return absl::OkStatus();
    };
    const FilePlace whole = {static_cast<int64_t>(i), 0, sums.bytes};
    const absl::Status status = reader->Read({whole}, take);
    if (status.ok()) {
      Compare(names[i], sums, blocks, problems);
    } else {
      problems.push_back(Make(names[i], status.message()));
    }
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
