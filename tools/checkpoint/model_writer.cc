#include "tools/checkpoint/model_writer.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/huggingface/file_plan.h"
#include "checkpoint/tensor/tensor_info.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/crc32.h"
#include "checkpoint/torch_archive/value.h"
#include "tools/checkpoint/cast_reader.h"
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

// Writes elements of a tensor one behind the other.
class Stretch {
 public:
  Stretch(RangeWriter& writer, int64_t file, int64_t offset)
      : writer_(writer), file_(file), at_(offset) {}

  absl::Status Add(absl::Span<const char> bytes) {
    const absl::string_view text(bytes.data(), bytes.size());
    FSDP_RETURN_IF_ERROR(WriteAt(writer_, file_, at_, text));
    at_ += static_cast<int64_t>(bytes.size());
    return absl::OkStatus();
  }

  // The same, and adds to the checksum that zip files have.
  absl::Status Add(absl::Span<const char> bytes, uint32_t& crc) {
    crc = Crc32({bytes.data(), bytes.size()}, crc);
    return Add(bytes);
  }

 private:
  RangeWriter& writer_;
  const int64_t file_;
  int64_t at_;
};

WriteReport ReportOf(const CastReader& reader, size_t files, int64_t bytes) {
  WriteReport report;
  report.tensors = static_cast<int64_t>(reader.infos().size());
  report.files = static_cast<int64_t>(files);
  report.bytes = bytes;
  return report;
}

absl::StatusOr<CastReader> ReaderFor(const Source& source,
                                     const WriteOptions& options) {
  return CastReader::Create(source, options.prefix, options.dtype,
                            options.progress);
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

// --- torch.distributed.checkpoint --------------------------------------------

struct DcpPlan {
  std::vector<DcpWriteTensor> tensors;
  std::vector<DcpRankFile> files;
  int64_t bytes = 0;
};

// As if a rank had written each file.
absl::StatusOr<DcpPlan> PlanDcp(const std::vector<TensorInfo>& infos,
                                const WriteOptions& options) {
  DcpPlan plan;
  std::vector<std::vector<DcpRange>> ranges(1);
  int64_t in_file = 0;
  for (size_t i = 0; i < infos.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(infos[i]));
    FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(infos[i]));
    if (in_file > 0 && bytes > options.max_file_bytes - in_file) {
      ranges.emplace_back();
      in_file = 0;
    }
    in_file += bytes;
    ranges.back().push_back({static_cast<int>(i), 0, numel});
    DcpWriteTensor tensor{infos[i], {}};
    if (!options.dcp_item.empty()) tensor.path.push_back(options.dcp_item);
    tensor.path.push_back(infos[i].name);
    tensor.info.name = DcpName(tensor.path);
    plan.tensors.push_back(std::move(tensor));
  }
  for (size_t rank = 0; rank < ranges.size(); ++rank) {
    FSDP_ASSIGN_OR_RETURN(
        DcpRankFile file,
        LayOutDcpFile(static_cast<int>(rank), plan.tensors, ranges[rank], {}));
    plan.bytes += file.bytes;
    plan.files.push_back(std::move(file));
  }
  return plan;
}

absl::Status WriteDcpChunk(CastReader& reader, const DcpWriteTensor& tensor,
                           const DcpFileChunk& chunk, int64_t file,
                           RangeWriter& writer) {
  Stretch stretch(writer, file, chunk.payload);
  uint32_t crc = 0;
  FSDP_RETURN_IF_ERROR(reader.Read(
      static_cast<size_t>(chunk.tensor), chunk.first,
      chunk.first + chunk.box.Numel(),
      [&](absl::Span<const char> bytes) { return stretch.Add(bytes, crc); }));
  for (const ArchivePiece& piece : FrameDcpChunk(tensor, chunk, crc)) {
    FSDP_RETURN_IF_ERROR(WriteAt(writer, file, piece.offset, piece.bytes));
  }
  return absl::OkStatus();
}

absl::Status WriteDcpFiles(CastReader& reader, const DcpPlan& plan,
                           RangeWriter& writer) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto file = static_cast<int64_t>(i);
    FSDP_RETURN_IF_ERROR(writer.SetSize(file, plan.files[i].bytes));
    for (const DcpFileChunk& chunk : plan.files[i].chunks) {
      FSDP_RETURN_IF_ERROR(
          WriteDcpChunk(reader, plan.tensors[static_cast<size_t>(chunk.tensor)],
                        chunk, file, writer));
    }
  }
  return writer.Finish().status();
}

// --- Hugging Face ------------------------------------------------------------

absl::Status WriteHuggingFaceFiles(CastReader& reader, const FilePlan& plan,
                                   RangeWriter& writer) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const auto file = static_cast<int64_t>(i);
    FSDP_RETURN_IF_ERROR(writer.SetSize(file, plan.files[i].bytes));
    FSDP_RETURN_IF_ERROR(WriteAt(writer, file, 0, plan.files[i].header));
  }
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    Stretch stretch(writer, plan.tensors[i].file, plan.tensors[i].offset);
    FSDP_RETURN_IF_ERROR(reader.Read(
        i, [&](absl::Span<const char> bytes) { return stretch.Add(bytes); }));
  }
  return writer.Finish().status();
}

// --- torch.save() ------------------------------------------------------------

Value StateDict(const std::vector<TensorInfo>& infos) {
  Value::Dict dict;
  for (const TensorInfo& info : infos) {
    ArchiveTensor tensor;
    tensor.dtype = info.dtype;
    tensor.shape = info.shape;
    dict.items.emplace_back(Value{info.name}, Value{std::move(tensor)});
  }
  return Value{std::move(dict)};
}

absl::Status WriteArchive(CastReader& reader, const ArchiveLayout& layout,
                          RangeWriter& writer) {
  FSDP_RETURN_IF_ERROR(writer.SetSize(0, layout.bytes()));
  std::vector<uint32_t> crcs(layout.payloads().size(), 0);
  for (size_t i = 0; i < crcs.size(); ++i) {
    Stretch stretch(writer, 0, layout.payloads()[i].offset);
    FSDP_RETURN_IF_ERROR(reader.Read(i, [&](absl::Span<const char> bytes) {
      return stretch.Add(bytes, crcs[i]);
    }));
  }
  for (const ArchivePiece& piece : layout.Frame(crcs)) {
    FSDP_RETURN_IF_ERROR(WriteAt(writer, 0, piece.offset, piece.bytes));
  }
  return writer.Finish().status();
}

}  // namespace

absl::StatusOr<WriteReport> WriteHuggingFace(const Source& source,
                                             const std::string& out,
                                             const WriteOptions& options) {
  FSDP_ASSIGN_OR_RETURN(CastReader reader, ReaderFor(source, options));
  FilePlanOptions layout;
  layout.max_file_bytes = options.max_file_bytes;
  FSDP_ASSIGN_OR_RETURN(const FilePlan plan, PlanFiles(reader.infos(), layout));
  int64_t bytes = static_cast<int64_t>(plan.index.size());
  for (const PlannedFile& file : plan.files) bytes += file.bytes;
  NewPath output(*source.files, out, NewPath::Kind::kFolder);
  FSDP_RETURN_IF_ERROR(Claim(output, *source.files, bytes));
  std::vector<std::string> paths;
  paths.reserve(plan.files.size());
  for (const PlannedFile& file : plan.files) {
    paths.push_back(JoinPath(output.incomplete(), file.name));
  }
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeWriter> writer,
                        RangeWriter::Create(*source.files, paths, {}));
  FSDP_RETURN_IF_ERROR(WriteHuggingFaceFiles(reader, plan, *writer));
  if (!plan.index_name.empty()) {
    FSDP_RETURN_IF_ERROR(ReplaceFile(
        *source.files, JoinPath(output.incomplete(), plan.index_name),
        plan.index));
  }
  FSDP_RETURN_IF_ERROR(output.Commit());
  return ReportOf(reader, plan.files.size(), bytes);
}

absl::StatusOr<WriteReport> WriteDcp(const Source& source,
                                     const std::string& out,
                                     const WriteOptions& options) {
  FSDP_ASSIGN_OR_RETURN(CastReader reader, ReaderFor(source, options));
  FSDP_ASSIGN_OR_RETURN(const DcpPlan plan, PlanDcp(reader.infos(), options));
  FSDP_ASSIGN_OR_RETURN(const std::string metadata,
                        DcpMetadataBytes(plan.tensors, {}, plan.files));
  const int64_t bytes = plan.bytes + static_cast<int64_t>(metadata.size());
  NewPath output(*source.files, out, NewPath::Kind::kFolder);
  FSDP_RETURN_IF_ERROR(Claim(output, *source.files, bytes));
  std::vector<std::string> paths;
  paths.reserve(plan.files.size());
  for (const DcpRankFile& file : plan.files) {
    paths.push_back(JoinPath(output.incomplete(), file.name));
  }
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<RangeWriter> writer,
                        RangeWriter::Create(*source.files, paths, {}));
  FSDP_RETURN_IF_ERROR(WriteDcpFiles(reader, plan, *writer));
  FSDP_RETURN_IF_ERROR(
      ReplaceFile(*source.files,
                  JoinPath(output.incomplete(), kDcpMetadataFile), metadata));
  FSDP_RETURN_IF_ERROR(output.Commit());
  return ReportOf(reader, plan.files.size() + 1, bytes);
}

absl::StatusOr<WriteReport> WriteTorch(const Source& source,
                                       const std::string& out,
                                       const WriteOptions& options) {
  FSDP_ASSIGN_OR_RETURN(CastReader reader, ReaderFor(source, options));
  FSDP_ASSIGN_OR_RETURN(const ArchiveLayout layout,
                        ArchiveLayout::Create(StateDict(reader.infos())));
  NewPath output(*source.files, out, NewPath::Kind::kFile);
  FSDP_RETURN_IF_ERROR(Claim(output, *source.files, layout.bytes()));
  FSDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<RangeWriter> writer,
      RangeWriter::Create(*source.files, {output.incomplete()}, {}));
  FSDP_RETURN_IF_ERROR(WriteArchive(reader, layout, *writer));
  FSDP_RETURN_IF_ERROR(output.Commit());
  return ReportOf(reader, 1, layout.bytes());
}

}  // namespace fsdp::checkpoint::tool
