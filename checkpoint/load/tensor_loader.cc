#include "checkpoint/load/tensor_loader.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/bytes/tensor_bytes.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/run/torch_dtype.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp::checkpoint {
namespace {

// One run of a file and the elements that it becomes.
struct Job {
  FileRun run;
  TensorSink sink;
};

int64_t BytesOf(const std::vector<WholeRead::Piece>& pieces) {
  int64_t bytes = 0;
  for (const WholeRead::Piece& piece : pieces) {
    int64_t elements = 1;
    for (const int64_t size : piece.shape) elements *= size;
    bytes += elements * ItemBytes(piece.tensor->info.dtype);
  }
  return bytes;
}

class Loader {
 public:
  Loader(const LoadPlan& plan, absl::Span<const LoadTarget> targets,
         RangeReader& reader, const LoadProgress& progress, int64_t first_file)
      : plan_(plan),
        targets_(targets),
        reader_(reader),
        progress_(progress),
        first_file_(first_file),
        all_(BytesOf(plan)) {}

  absl::Status Run() {
    const NormalMode normal;
    const c10::NoGradGuard no_grad;
    // What stays in memory is read in one go.
    std::map<int, std::vector<const StraightRead*>> by_unit;
    constexpr int kStays = -1;
    for (const StraightRead& read : plan_.straight) {
      const LoadTarget& target = targets_[read.target];
      by_unit[RestsElsewhere(target.values) ? target.unit : kStays].push_back(
          &read);
    }
    for (const auto& [unit, reads] : by_unit) {
      FSDP_RETURN_IF_ERROR(LoadTogether(reads));
    }
    for (const WholeRead& read : plan_.whole) {
      FSDP_RETURN_IF_ERROR(LoadWhole(read));
    }
    return LoadConverted();
  }

 private:
  absl::Status LoadTogether(const std::vector<const StraightRead*>& reads) {
    Resident resident;
    std::vector<Job> jobs;
    for (const StraightRead* read : reads) {
      const at::Tensor& values = targets_[read->target].values;
      FSDP_RETURN_IF_ERROR(resident.Add(values, Use::kUpdate));
      const auto elements =
          static_cast<int64_t>(read->run.bytes / c10::elementSize(read->dtype));
      jobs.push_back({read->run, TensorSink(values.detach().narrow(
                                                0, read->element, elements),
                                            read->dtype)});
    }
    return Read(jobs);
  }

  absl::Status LoadWhole(const WholeRead& read) {
    const LoadTarget& target = targets_[read.target];
    FSDP_ASSIGN_OR_RETURN(at::Tensor whole,
                          ReadTogether(read.pieces, read.dim));
    if (read.conversion.has_value()) {
      FSDP_ASSIGN_OR_RETURN(
          whole, Converted(target, *read.conversion, whole, /*first_row=*/0));
    }
    return target.take_whole(whole);
  }

  absl::StatusOr<at::Tensor> ReadTogether(
      const std::vector<WholeRead::Piece>& pieces, int64_t dim) {
    std::vector<at::Tensor> tensors;
    for (const WholeRead::Piece& piece : pieces) {
      at::Tensor& tensor = tensors.emplace_back(
          at::empty(piece.shape, *TorchDtype(piece.tensor->info.dtype)));
      FSDP_RETURN_IF_ERROR(
          ReadPiece(*piece.tensor, piece.begin, tensor.view({-1})));
      if (piece.transposed) tensor = tensor.transpose(0, 1);
    }
    if (tensors.size() == 1) return tensors.front();
    at::Tensor together;
    FSDP_RETURN_IF_ERROR(TorchToStatus("putting a tensor together", [&] {
      together = at::cat(tensors, dim);
    }));
    return together;
  }

  // What rests elsewhere is in memory one unit at a time here, too.
  absl::Status LoadConverted() {
    Resident resident;
    int unit = -1;
    for (const ConvertedRead& read : plan_.converted) {
      const LoadTarget& target = targets_[read.target];
      if (std::exchange(unit, target.unit) != target.unit) {
        resident = Resident();
      }
      FSDP_RETURN_IF_ERROR(resident.Add(target.values, Use::kUpdate));
      FSDP_RETURN_IF_ERROR(LoadRows(read, target));
    }
    return absl::OkStatus();
  }

  absl::Status LoadRows(const ConvertedRead& read, const LoadTarget& target) {
    at::Tensor rows;
    FSDP_ASSIGN_OR_RETURN(rows, ReadTogether(read.pieces, /*dim=*/0));
    FSDP_ASSIGN_OR_RETURN(
        rows, Converted(target, read.conversion, rows, read.first_row));
    return TorchToStatus(target.name, [&] {
      const int64_t begin = read.first_row * (rows.numel() / rows.size(0));
      const int64_t from = std::max(begin, target.begin);
      const int64_t to =
          std::min(begin + rows.numel(), target.begin + target.values.numel());
      target.values.detach()
          .narrow(0, from - target.begin, to - from)
          .copy_(rows.flatten().narrow(0, from - begin, to - from));
    });
  }

  // With what went wrong the name and the rows.
  static absl::StatusOr<at::Tensor> Converted(const LoadTarget& target,
                                              const RowConversion& conversion,
                                              const at::Tensor& rows,
                                              int64_t first_row) {
    absl::StatusOr<at::Tensor> converted = absl::UnknownError("");
    FSDP_RETURN_IF_ERROR(TorchToStatus(
        target.name, [&] { converted = conversion.convert(rows); }));
    if (converted.ok()) return converted;
    return absl::Status(converted.status().code(),
                        absl::StrCat(target.name, ", rows ", first_row, " to ",
                                     first_row + rows.size(0) - 1, ": ",
                                     converted.status().message()));
  }

  absl::Status ReadPiece(const StoredTensor& stored, int64_t begin,
                         const at::Tensor& values) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                          RunsOf(stored, begin, begin + values.numel()));
    const int64_t item = ItemBytes(stored.info.dtype);
    std::vector<Job> jobs;
    jobs.reserve(runs.size());
    for (const FileRun& run : runs) {
      jobs.push_back({run, TensorSink(values.narrow(0, run.target / item,
                                                    run.bytes / item),
                                      values.scalar_type())});
    }
    return Read(jobs);
  }

  absl::Status Read(std::vector<Job>& jobs) {
    std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) {
      return std::tie(a.run.file, a.run.offset) <
             std::tie(b.run.file, b.run.offset);
    });
    std::vector<ReadRange> ranges;
    ranges.reserve(jobs.size());
    for (const Job& job : jobs) {
      ranges.push_back(
          {first_file_ + job.run.file, job.run.offset, job.run.bytes});
    }
    return reader_.Read(ranges, [&](size_t range, int64_t position,
                                    absl::Span<const char> bytes) {
      done_ += static_cast<int64_t>(bytes.size());
      if (progress_ != nullptr) progress_(done_, all_);
      return jobs[range].sink.Write(position, bytes);
    });
  }

  const LoadPlan& plan_;
  const absl::Span<const LoadTarget> targets_;
  RangeReader& reader_;
  const LoadProgress& progress_;
  const int64_t first_file_;
  int64_t done_ = 0;
  const int64_t all_;
};

}  // namespace

int64_t BytesOf(const LoadPlan& plan) {
  int64_t bytes = 0;
  for (const StraightRead& read : plan.straight) bytes += read.run.bytes;
  for (const WholeRead& read : plan.whole) bytes += BytesOf(read.pieces);
  for (const ConvertedRead& read : plan.converted) {
    bytes += BytesOf(read.pieces);
  }
  return bytes;
}

absl::Status LoadTensors(const LoadPlan& plan,
                         absl::Span<const LoadTarget> targets,
                         RangeReader& reader, const LoadProgress& progress,
                         int64_t first_file) {
  return Loader(plan, targets, reader, progress, first_file).Run();
}

}  // namespace fsdp::checkpoint
