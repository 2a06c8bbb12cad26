#include "tools/checkpoint/consolidate.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/huggingface/file_plan.h"
#include "checkpoint/tensor/tensor_info.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

absl::Status WriteAt(RangeWriter& writer, int64_t file, int64_t offset,
                     absl::string_view bytes) {
  return writer.Write(file, offset, static_cast<int64_t>(bytes.size()),
                      [bytes](int64_t position, absl::Span<char> out) {
                        std::memcpy(out.data(), bytes.data() + position,
                                    out.size());
                        return absl::OkStatus();
                      });
}

// Refuses what the disk has no room for, once what a killed program has left
// there is gone.
absl::Status Claim(NewPath& output, FileSystem& files, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(output.Claim("writes a model"));
  FSDP_ASSIGN_OR_RETURN(const int64_t space,
                        files.FreeBytes(FolderOf(output.path())));
  if (space >= bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      output.path(), " will have ", SizeText(bytes), ", and the disk has ",
      SizeText(space), ": free space there or choose another folder"));
}

absl::Status WriteFiles(const Source& source, const FilePlan& plan,
                        const OnBytes& progress, RangeWriter& writer) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto file = static_cast<int64_t>(i);
    FSDP_RETURN_IF_ERROR(writer.SetSize(file, plan.files[i].bytes));
    FSDP_RETURN_IF_ERROR(WriteAt(writer, file, 0, plan.files[i].header));
  }
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeReader> reader,
                        ReaderOf(source));
  int64_t done = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    int64_t at = plan.tensors[i].offset;
    const auto take = [&](absl::Span<const char> bytes) {
      const absl::string_view text(bytes.data(), bytes.size());
      const absl::Status status =
          WriteAt(writer, plan.tensors[i].file, at, text);
      at += static_cast<int64_t>(bytes.size());
      done += static_cast<int64_t>(bytes.size());
      if (progress) progress(done, plan.total_bytes);
      return status;
    };
    FSDP_RETURN_IF_ERROR(
        StreamTensor(*reader, source.catalog.tensors()[i], take));
  }
  return writer.Finish().status();
}

}  // namespace

absl::StatusOr<std::string> Consolidate(FileSystem& files,
                                        const std::string& in,
                                        const std::string& out,
                                        const ConsolidateOptions& options) {
  SourceOptions opening;
  opening.model_only = true;
  opening.unchecked = options.unchecked;
  FSDP_ASSIGN_OR_RETURN(const Source source, OpenSource(files, in, opening));
  if (!HasRankFiles(source)) {
    return absl::InvalidArgumentError(
        absl::StrCat(source.path, " is ", NameOf(source.format),
                     ", without files of single ranks, and is read as it is; "
                     "tools/interop/dcp.py model casts and splits"));
  }
  std::vector<TensorInfo> infos;
  for (const StoredTensor& tensor : source.catalog.tensors()) {
    infos.push_back(tensor.info);
  }
  FilePlanOptions layout;
  layout.max_file_bytes = options.max_file_bytes;
  FSDP_ASSIGN_OR_RETURN(const FilePlan plan, PlanFiles(infos, layout));
  auto bytes = static_cast<int64_t>(plan.index.size());
  NewPath output(files, out, NewPath::Kind::kFolder);
  std::vector<std::string> paths;
  for (const PlannedFile& file : plan.files) {
    bytes += file.bytes;
    paths.push_back(JoinPath(output.incomplete(), file.name));
  }
  FSDP_RETURN_IF_ERROR(Claim(output, files, bytes));
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeWriter> writer,
                        RangeWriter::Create(files, paths, {}));
  FSDP_RETURN_IF_ERROR(WriteFiles(source, plan, options.progress, *writer));
  if (!plan.index_name.empty()) {
    FSDP_RETURN_IF_ERROR(ReplaceFile(
        files, JoinPath(output.incomplete(), plan.index_name), plan.index));
  }
  FSDP_RETURN_IF_ERROR(output.Commit());
  return absl::StrCat(
      Printable(out), ": ", Count(static_cast<int64_t>(infos.size()), "tensor"),
      " in ", Count(static_cast<int64_t>(plan.files.size()), "file"), ", ",
      SizeText(bytes), "\n");
}

}  // namespace fsdp::checkpoint::tool
