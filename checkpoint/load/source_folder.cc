#include "checkpoint/load/source_folder.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/format/safetensors_header.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kEnding[] = ".safetensors";
constexpr char kIndexEnding[] = ".safetensors.index.json";
// An index may be ten times as large as that of the largest models there are.
constexpr int64_t kMaxIndexBytes = int64_t{256} << 20;

// So much is read of every safetensors file. Most headers are shorter.
constexpr int64_t kHeadBytes = int64_t{64} << 10;

RangeReaderOptions ForSmallReads() {
  RangeReaderOptions options;
  options.chunk_bytes = kBlockBytes;
  options.caching = Caching::kCached;
  return options;
}

absl::StatusOr<std::vector<std::string>> ReadBytes(
    RangeReader& reader, absl::Span<const FilePlace> ranges) {
  std::vector<std::string> texts(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) texts[i].reserve(ranges[i].bytes);
  FSDP_RETURN_IF_ERROR(reader.Read(
      ranges, [&texts](size_t i, int64_t, absl::Span<const char> part) {
        texts[i].append(part.data(), part.size());
        return absl::OkStatus();
      }));
  return texts;
}

// Says for an error how the files of a folder are converted.
std::string HowToConvert(const std::vector<std::string>& names) {
  if (absl::c_linear_search(names, ".metadata")) {
    return "; it is a checkpoint of torch.distributed.checkpoint, of which "
           "`tools/interop/dcp.py import` makes a model, or a checkpoint of "
           "ours";
  }
  const bool has_pickle = absl::c_any_of(names, [](const std::string& name) {
    return absl::EndsWith(name, ".bin") || absl::EndsWith(name, ".pt") ||
           absl::EndsWith(name, ".pth");
  });
  return has_pickle ? "; `tools/interop/dcp.py model` makes safetensors of "
                      "what torch.save() wrote"
                    : "";
}

}  // namespace

absl::StatusOr<SourceFile> SourceFolder::SourceOf(
    const std::string& name) const {
  SourceFile source{PathOf(name)};
  if (!sums_.has_value()) return source;
  const auto found = sums_->find(name);
  if (found == sums_->end()) {
    return absl::NotFoundError(absl::StrCat(
        PathOf(name), ": the manifest of the checkpoint does not name it"));
  }
  source.sums = &found->second;
  return source;
}

absl::StatusOr<std::string> SourceFolder::ReadText(const std::string& name,
                                                   int64_t max_bytes) const {
  FSDP_ASSIGN_OR_RETURN(SourceFile source, SourceOf(name));
  FSDP_ASSIGN_OR_RETURN(
      const auto reader,
      RangeReader::Create(files_, {std::move(source)}, ForSmallReads()));
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, reader->SizeOf(0));
  if (bytes > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(PathOf(name), ": has ", bytes, " bytes, where ", max_bytes,
                     " are the most that such a file can have"));
  }
  FSDP_ASSIGN_OR_RETURN(std::vector<std::string> text,
                        ReadBytes(*reader, {{0, 0, bytes}}));
  return std::move(text.front());
}

absl::Status SourceFolder::AddHeader(
    const std::string& name, int64_t file, std::string head,
    RangeReader& reader, std::vector<SafetensorsFile>& headers) const {
  FSDP_ASSIGN_OR_RETURN(const int64_t size, reader.SizeOf(file));
  FSDP_ASSIGN_OR_RETURN(
      const int64_t length,
      Annotate(
          ParseSafetensorsLength(
              absl::string_view(head).substr(0, kSafetensorsLengthBytes), size),
          PathOf(name)));
  const int64_t end = kSafetensorsLengthBytes + length;
  const auto have = static_cast<int64_t>(head.size());
  if (have < end) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> rest,
                          ReadBytes(reader, {{file, have, end - have}}));
    head += rest.front();
  }
  FSDP_ASSIGN_OR_RETURN(
      SafetensorsHeader header,
      Annotate(ParseSafetensorsHeader(absl::string_view(head).substr(
                                          kSafetensorsLengthBytes, length),
                                      size),
               PathOf(name)));
  headers.push_back({name, std::move(header)});
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SafetensorsFile>> SourceFolder::ReadHeaders(
    absl::Span<const std::string> names, bool skip_missing) const {
  std::vector<std::string> found;
  std::vector<SourceFile> sources;
  for (const std::string& name : names) {
    absl::StatusOr<SourceFile> source = SourceOf(name);
    if (skip_missing && absl::IsNotFound(source.status())) continue;
    FSDP_RETURN_IF_ERROR(source.status());
    found.push_back(name);
    sources.push_back(*std::move(source));
  }
  FSDP_ASSIGN_OR_RETURN(
      const auto reader,
      RangeReader::Create(files_, std::move(sources), ForSmallReads()));
  std::vector<SafetensorsFile> headers;
  const auto count = static_cast<int64_t>(found.size());
  // As many at once as stay open, so that each is opened once.
  for (int64_t i = 0; i < count;) {
    std::vector<FilePlace> heads;
    const int64_t end = std::min(count, i + RangeReader::kMostOpenFiles);
    for (; i < end; ++i) {
      const absl::StatusOr<int64_t> size = reader->SizeOf(i);
      if (skip_missing && absl::IsNotFound(size.status())) continue;
      FSDP_RETURN_IF_ERROR(size.status());
      heads.push_back({i, 0, std::min(*size, kHeadBytes)});
    }
    FSDP_ASSIGN_OR_RETURN(std::vector<std::string> texts,
                          ReadBytes(*reader, heads));
    for (size_t k = 0; k < heads.size(); ++k) {
      FSDP_RETURN_IF_ERROR(AddHeader(found[heads[k].file], heads[k].file,
                                     std::move(texts[k]), *reader, headers));
    }
  }
  return headers;
}

absl::StatusOr<Catalog> SourceFolder::ReadIndexed(
    const std::string& index_name) const {
  FSDP_ASSIGN_OR_RETURN(const std::string text,
                        ReadText(index_name, kMaxIndexBytes));
  FSDP_ASSIGN_OR_RETURN(FileIndex index,
                        Annotate(ParseFileIndex(text), PathOf(index_name)));
  const std::string folder(FolderPart(index_name));
  for (std::string& name : index.files) name.insert(0, folder);
  // What is missing is listed with all others.
  FSDP_ASSIGN_OR_RETURN(const std::vector<SafetensorsFile> headers,
                        ReadHeaders(index.files, /*skip_missing=*/true));
  return Annotate(CatalogOfHuggingFace(index, headers), PathOf(index_name));
}

absl::StatusOr<Catalog> SourceFolder::ReadAll(
    absl::Span<const std::string> names) const {
  FSDP_ASSIGN_OR_RETURN(const std::vector<SafetensorsFile> headers,
                        ReadHeaders(names, /*skip_missing=*/false));
  return Annotate(CatalogOfSafetensors(headers), root_);
}

absl::StatusOr<Catalog> SourceFolder::ReadStem(const std::string& stem) const {
  std::vector<std::string> names;
  if (sums_.has_value()) {
    for (const auto& [name, sums] : *sums_) names.push_back(name);
  } else {
    FSDP_ASSIGN_OR_RETURN(names, files_.List(FolderOf(JoinPath(root_, stem))));
    const std::string folder(FolderPart(stem));
    for (std::string& name : names) name.insert(0, folder);
  }
  const std::string index = absl::StrCat(stem, kIndexEnding);
  if (absl::c_linear_search(names, index)) return ReadIndexed(index);
  // The files of ranks, if there are any.
  names.erase(std::remove_if(names.begin(), names.end(),
                             [&stem](const std::string& name) {
                               return StemOfShardFile(name) != stem;
                             }),
              names.end());
  if (!names.empty()) return ReadAll(names);
  return ReadAll({absl::StrCat(stem, kEnding)});
}

absl::StatusOr<Catalog> SourceFolder::ReadFileOrIndex(
    const std::string& name) const {
  return absl::EndsWith(name, kIndexEnding) ? ReadIndexed(name)
                                            : ReadAll({name});
}

absl::StatusOr<Catalog> SourceFolder::ReadModel() const {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        files_.List(root_));
  std::vector<std::string> indices;
  std::vector<std::string> weights;
  for (const std::string& name : names) {
    if (absl::EndsWith(name, kIndexEnding)) indices.push_back(name);
    if (absl::EndsWith(name, kEnding)) weights.push_back(name);
  }
  // Mistral's folders have the model twice, with other names in this one.
  const auto begins_with = [](absl::string_view stem) {
    return [stem](const std::string& name) {
      return absl::StartsWith(name, stem);
    };
  };
  if (absl::c_any_of(weights, begins_with("model"))) {
    for (std::vector<std::string>* const list : {&indices, &weights}) {
      list->erase(std::remove_if(list->begin(), list->end(),
                                 begins_with("consolidated")),
                  list->end());
    }
  }
  if (indices.size() == 1) return ReadIndexed(indices.front());
  if (indices.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(root_, " has several models: ", indices[0], " and ",
                     indices[1], ": name the one that is to be loaded"));
  }
  const std::string usual = absl::StrCat("model", kEnding);
  if (std::find(weights.begin(), weights.end(), usual) != weights.end()) {
    return ReadAll({usual});
  }
  if (!weights.empty()) return ReadAll(weights);
  return absl::NotFoundError(absl::StrCat(root_, " has no model: neither *",
                                          kIndexEnding, " nor *", kEnding,
                                          " is there", HowToConvert(names)));
}

absl::StatusOr<std::unique_ptr<RangeReader>> SourceFolder::Open(
    absl::Span<const Catalog* const> catalogs,
    const RangeReaderOptions& options) const {
  std::vector<SourceFile> sources;
  for (const Catalog* const catalog : catalogs) {
    for (const NamedSize& file : catalog->files()) {
      FSDP_ASSIGN_OR_RETURN(SourceFile source, SourceOf(file.name));
      sources.push_back(std::move(source));
    }
  }
  return RangeReader::Create(files_, std::move(sources), options);
}

}  // namespace fsdp::checkpoint
