#include "checkpoint/save/dcp_export.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/dcp_catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/run/together.h"
#include "checkpoint/save/dcp_file_writer.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "comm/agreement.h"
#include "offload/checksum.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "DCP export";

DcpPath SlotPath(DcpNames names, const std::string& name,
                 const std::string& key) {
  if (names == DcpNames::kTorchtitan) {
    return {"optimizer", absl::StrCat("state.", name, ".", key)};
  }
  return {"optim", "state", name, key};
}

absl::StatusOr<DcpPath> PathOf(DcpNames names, const TensorGroup& group,
                               const TensorPart& part) {
  if (group.stem == "model") {
    if (names == DcpNames::kTorchtitan) return DcpPath{part.info.name};
    return DcpPath{"model", part.info.name};
  }
  absl::string_view key = group.stem;
  if (absl::ConsumePrefix(&key, "optimizer/")) {
    return SlotPath(names, part.info.name, std::string(key));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "DCP checkpoints have no place for tensors of ", group.stem));
}

class Export {
 public:
  Export(FileSystem& files, const std::string& folder,
         comm::Communicator* ranks, const DcpExportOptions& options)
      : files_(files),
        output_(files, folder, NewPath::Kind::kFolder),
        together_(ranks, kLabel, options.timeout),
        options_(options),
        rank_(together_.rank()) {}

  absl::Status Run(absl::Span<const TensorGroup> groups) {
    absl::Status status = LayOut(groups);
    if (status.ok() && rank_ == 0) {
      status = output_.Claim("exports a DCP checkpoint");
    }
    FSDP_RETURN_IF_ERROR(together_.Agree(status));
    FSDP_RETURN_IF_ERROR(GatherRanges());
    FSDP_RETURN_IF_ERROR(
        together_.Agree(Caught(kLabel, [this] { return WriteFile(); })));
    return together_.Agree(rank_ == 0 ? Commit() : absl::OkStatus());
  }

 private:
  // --- What there is to write -----------------------------------------------

  void Add(TensorPart part, DcpPath path) {
    TensorInfo info = part.info;
    info.name = DcpName(path);
    absl::StrAppend(&text_, info.name, " ", ToString(info), "\n");
    tensors_.push_back({std::move(info), std::move(path)});
    parts_.push_back(std::move(part));
  }

  void AddNumbers() {
    for (const auto& [name, numbers] : options_.numbers) {
      for (const auto& [key, number] : numbers) {
        TensorPart part{{"", Dtype::kF32, {}}, 0, at::empty({0})};
        if (rank_ == 0) part.values = at::full({1}, number, at::kFloat);
        Add(std::move(part), SlotPath(options_.names, name, key));
      }
    }
  }

  absl::Status LayOut(absl::Span<const TensorGroup> groups) {
    for (const TensorGroup& group : groups) {
      for (const TensorPart& part : group.parts) {
        FSDP_ASSIGN_OR_RETURN(DcpPath path,
                              PathOf(options_.names, group, part));
        Add(part, std::move(path));
      }
    }
    AddNumbers();
    std::vector<DcpRange> ranges;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const TensorPart& part = parts_[i];
      FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(part.info));
      const int64_t count = part.values.numel();
      if (count > 0 || (numel == 0 && rank_ == 0)) {
        ranges.push_back({static_cast<int>(i), part.begin, part.begin + count});
      }
    }
    FSDP_ASSIGN_OR_RETURN(DcpRankFile file, LayOutRank(rank_, ranges));
    ranges_ = {std::move(ranges)};
    file_ = std::move(file);
    return absl::OkStatus();
  }

  absl::StatusOr<DcpRankFile> LayOutRank(
      int rank, absl::Span<const DcpRange> ranges) const {
    absl::Span<const DcpWriteValue> values;
    if (rank == 0) values = options_.values;
    return LayOutDcpFile(rank, tensors_, ranges, values,
                         options_.max_chunk_bytes);
  }

  // --- Between ranks --------------------------------------------------------

  // A number for what all ranks have to agree on, then the ranges that have
  // elements: of a sharded model few ranks have some of a parameter.
  std::string EncodeRanges() const {
    std::vector<int64_t> numbers = {PlanNumber()};
    for (const DcpRange& range : ranges_.front()) {
      numbers.insert(numbers.end(), {range.tensor, range.begin, range.end});
    }
    return std::string(reinterpret_cast<const char*>(numbers.data()),
                       numbers.size() * sizeof(int64_t));
  }

  int64_t PlanNumber() const {
    return offload::Crc32c(absl::StrCat(text_, options_.max_chunk_bytes, "\n"));
  }

  // Every rank's ranges, in ranges_ of rank 0.
  absl::Status GatherRanges() {
    if (together_.ranks() == nullptr) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(
        const std::vector<std::string> texts,
        comm::GatherStrings(*together_.ranks(), EncodeRanges(), kLabel,
                            together_.Deadline()));
    std::vector<std::vector<DcpRange>> all;
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      std::vector<int64_t> numbers(texts[rank].size() / sizeof(int64_t));
      std::memcpy(numbers.data(), texts[rank].data(),
                  numbers.size() * sizeof(int64_t));
      if (numbers.size() % 3 != 1) {
        return absl::InternalError(absl::StrCat("rank ", rank, " has sent ",
                                                texts[rank].size(),
                                                " bytes, which are no ranges"));
      }
      // All see the same numbers and come to the same end.
      int64_t first = 0;
      std::memcpy(&first, texts[0].data(), sizeof(first));
      if (numbers[0] != first) {
        return absl::InvalidArgumentError(
            absl::StrCat("rank ", rank, " exports other tensors than rank 0: ",
                         "all ranks pass the same model and options"));
      }
      std::vector<DcpRange>& ranges = all.emplace_back();
      for (size_t i = 1; i < numbers.size(); i += 3) {
        ranges.push_back(
            {static_cast<int>(numbers[i]), numbers[i + 1], numbers[i + 2]});
      }
    }
    if (rank_ == 0) ranges_ = std::move(all);
    return absl::OkStatus();
  }

  // --- Files ----------------------------------------------------------------

  absl::Status WriteFile() const {
    if (file_.bytes == 0) return absl::OkStatus();
    return WriteDcpFile(files_, JoinPath(output_.incomplete(), file_.name),
                        file_, tensors_, parts_, options_.writer);
  }

  absl::Status Commit() {
    std::vector<DcpRankFile> layouts;
    for (size_t rank = 0; rank < ranges_.size(); ++rank) {
      FSDP_ASSIGN_OR_RETURN(DcpRankFile layout,
                            LayOutRank(static_cast<int>(rank), ranges_[rank]));
      layouts.push_back(std::move(layout));
    }
    FSDP_ASSIGN_OR_RETURN(const std::string metadata,
                          DcpMetadataBytes(tensors_, options_.values, layouts));
    FSDP_RETURN_IF_ERROR(ReplaceFile(
        files_, JoinPath(output_.incomplete(), kDcpMetadataFile), metadata));
    return output_.Commit();
  }

  FileSystem& files_;
  NewPath output_;  // claimed by rank 0
  const Together together_;
  const DcpExportOptions& options_;
  const int rank_;
  std::vector<DcpWriteTensor> tensors_;
  std::vector<TensorPart> parts_;  // of tensors_
  std::string text_;               // what ranks have to agree on
  // This rank's; on rank 0, once they are gathered, those of all.
  std::vector<std::vector<DcpRange>> ranges_;
  DcpRankFile file_;
};

}  // namespace

absl::Status WriteDcp(FileSystem& files, const std::string& folder,
                      absl::Span<const TensorGroup> groups,
                      comm::Communicator* ranks,
                      const DcpExportOptions& options) {
  return Export(files, folder, ranks, options).Run(groups);
}

}  // namespace fsdp::checkpoint
