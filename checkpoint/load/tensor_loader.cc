#include "checkpoint/load/tensor_loader.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/tensor_bytes.h"
#include "checkpoint/format/tensor_info.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/state/model_values.h"

namespace fsdp::checkpoint {
namespace {

// Bytes of a file and the elements that they become.
struct Job {
  FilePlace place;
  TensorSink sink;
  const std::string* name;  // of the tensor
};

int64_t BytesOf(const std::vector<WholeRead::Piece>& pieces) {
  int64_t bytes = 0;
  for (const WholeRead::Piece& piece : pieces) {
    bytes += c10::multiply_integers(piece.shape) *
             ItemBytes(piece.tensor->info.dtype);
    if (piece.scale != nullptr) bytes += *BytesOf(piece.scale->info);
  }
  return bytes;
}

// Rows of a tensor that has `all_rows`, from `first` on, times what `scale`
// has for them.
at::Tensor Scaled(const at::Tensor& rows, const at::Tensor& scale,
                  int64_t first, int64_t all_rows) {
  const at::Tensor numbers = rows.to(c10::kFloat).flatten(1);
  const at::Tensor factors =
      scale.to(c10::kFloat).reshape({scale.dim() == 0 ? 1 : scale.size(0), -1});
  const auto index = [&factors](int64_t dim, int64_t begin, int64_t count,
                                int64_t all) {
    const int64_t several = factors.size(dim);
    const int64_t block = several == 1 ? all : several == all ? 1 : kScaleBlock;
    return at::arange(begin, begin + count)
        .div(std::max<int64_t>(1, block), /*rounding_mode=*/"floor");
  };
  const int64_t columns = numbers.size(1);
  return (numbers *
          factors.index_select(0, index(0, first, rows.size(0), all_rows))
              .index_select(1, index(1, 0, columns, columns)))
      .view_as(rows);
}

absl::Status CopyDiffers(const CopiedRead& read) {
  return absl::InvalidArgumentError(absl::StrCat(
      read.copy->info.name, " differs from ", read.tensor->info.name,
      ", and both are one parameter of the model: make it a model that has "
      "two, for one of Hugging Face's by setting tie_word_embeddings to false "
      "in config.json"));
}

class Loader {
 public:
  Loader(const LoadPlan& plan, absl::Span<const TensorRange> targets,
         RangeReader& reader, const LoadProgress& progress, int64_t first_file)
      : plan_(plan),
        targets_(targets),
        reader_(reader),
        progress_(progress),
        first_file_(first_file),
        all_(BytesOf(plan)) {}

  // Compares tensors that are there twice, a few elements at a time.
  absl::Status CompareCopies() {
    constexpr int64_t kElements = int64_t{1} << 20;
    for (const CopiedRead& read : plan_.copied) {
      if (read.tensor->info.dtype != read.copy->info.dtype ||
          read.tensor->info.shape != read.copy->info.shape) {
        return CopyDiffers(read);
      }
      const auto dtype = TorchDtype(read.tensor->info.dtype);
      for (int64_t i = read.begin; i < read.end; i += kElements) {
        const int64_t count = std::min(kElements, read.end - i);
        const at::Tensor one = at::empty({count}, *dtype);
        const at::Tensor other = at::empty({count}, *dtype);
        FSDP_RETURN_IF_ERROR(ReadPiece(*read.tensor, i, one));
        FSDP_RETURN_IF_ERROR(ReadPiece(*read.copy, i, other));
        if (std::memcmp(one.data_ptr(), other.data_ptr(), one.nbytes()) != 0) {
          return CopyDiffers(read);
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status Run() {
    const NormalMode normal;
    const c10::NoGradGuard no_grad;
    // What stays in memory is read in one go.
    std::map<int, std::vector<const StraightRead*>> by_unit;
    constexpr int kStays = -1;
    for (const StraightRead& read : plan_.straight) {
      const TensorRange& target = targets_[read.target];
      by_unit[RestsElsewhere(target.values) ? target.unit : kStays].push_back(
          &read);
    }
    for (const auto& [unit, reads] : by_unit) {
      FSDP_RETURN_IF_ERROR(LoadTogether(reads));
    }
    return LoadWhole();
  }

 private:
  absl::Status LoadTogether(const std::vector<const StraightRead*>& reads) {
    Resident resident;
    std::vector<Job> jobs;
    for (const StraightRead* read : reads) {
      const TensorRange& target = targets_[read->target];
      FSDP_RETURN_IF_ERROR(resident.Add(target.values, Use::kUpdate));
      const auto elements =
          static_cast<int64_t>(read->run.bytes / c10::elementSize(read->dtype));
      jobs.push_back({read->run,
                      TensorSink(target.RowMajorValues().detach().narrow(
                                     0, read->element, elements),
                                 read->dtype),
                      &target.name});
    }
    return Read(jobs);
  }

  // What rests elsewhere is in memory one unit at a time.
  absl::Status LoadWhole() {
    Resident resident;
    int unit = -1;
    for (const WholeRead& read : plan_.whole) {
      const TensorRange& target = targets_[read.target];
      if (std::exchange(unit, target.unit) != target.unit) {
        resident = Resident();
      }
      FSDP_RETURN_IF_ERROR(resident.Add(target.values, Use::kUpdate));
      FSDP_ASSIGN_OR_RETURN(
          at::Tensor rows,
          ReadTogether(read.pieces, read.dim,
                       read.conversion.has_value()
                           ? std::nullopt
                           : std::optional(target.file_dtype())));
      if (read.conversion.has_value()) {
        FSDP_ASSIGN_OR_RETURN(
            rows, Converted(target, *read.conversion, rows, read.first_row));
      }
      if (!target.is_whole && !target.IsRowMajor()) {
        FSDP_RETURN_IF_ERROR(TakeOwnPart(rows, target));
        continue;
      }
      FSDP_RETURN_IF_ERROR(TorchToStatus(
          target.name, [&] { TakeRows(rows, read.first_row, target); }));
    }
    return absl::OkStatus();
  }

  // Copies what `target`, which is row-major or whole, has of these rows.
  static void TakeRows(const at::Tensor& rows, int64_t first_row,
                       const TensorRange& target) {
    const at::Tensor values = target.RowMajorValues();
    if (!values.defined()) return CopyInto(target.values.detach(), rows);
    const int64_t begin =
        first_row == 0 ? 0 : first_row * (rows.numel() / rows.size(0));
    const int64_t from = std::max(begin, target.begin);
    const int64_t to = std::min(begin + rows.numel(), target.end());
    if (from >= to) return;
    values.detach()
        .narrow(0, from - target.begin, to - from)
        .copy_(rows.flatten().narrow(0, from - begin, to - from));
  }

  // Nothing: in the file's dtype.
  absl::StatusOr<at::Tensor> ReadTogether(
      const std::vector<WholeRead::Piece>& pieces, int64_t dim,
      std::optional<c10::ScalarType> dtype = std::nullopt) {
    std::vector<at::Tensor> tensors;
    for (const WholeRead::Piece& piece : pieces) {
      at::Tensor& tensor = tensors.emplace_back(at::empty(
          piece.shape, dtype.value_or(*TorchDtype(piece.tensor->info.dtype))));
      FSDP_RETURN_IF_ERROR(
          ReadPiece(*piece.tensor, piece.begin, tensor.view({-1})));
      if (piece.scale != nullptr) {
        const StoredTensor& stored = *piece.scale;
        FSDP_ASSIGN_OR_RETURN(
            const at::Tensor scale,
            ReadTogether({{&stored, 0, stored.info.shape}}, /*dim=*/0));
        FSDP_RETURN_IF_ERROR(TorchToStatus(stored.info.name, [&] {
          const int64_t row = std::max<int64_t>(
              1, tensor.numel() / std::max<int64_t>(1, tensor.size(0)));
          tensor = Scaled(tensor, scale, piece.begin / row,
                          piece.tensor->info.shape[0]);
        }));
      }
      if (piece.transposed) tensor = tensor.transpose(0, 1);
    }
    if (tensors.size() == 1) return tensors.front();
    at::Tensor together;
    FSDP_RETURN_IF_ERROR(TorchToStatus("putting a tensor together", [&] {
      together = at::cat(tensors, dim);
    }));
    return together;
  }

  // In the target's dtype. With what went wrong the name and the rows.
  static absl::StatusOr<at::Tensor> Converted(const TensorRange& target,
                                              const RowConversion& conversion,
                                              const at::Tensor& rows,
                                              int64_t first_row) {
    absl::StatusOr<at::Tensor> converted = absl::UnknownError("");
    FSDP_RETURN_IF_ERROR(TorchToStatus(target.name, [&] {
      converted = conversion.convert(rows);
      if (!converted.ok()) return;
      const at::Tensor cast = converted->to(target.file_dtype());
      const absl::Status fits = CheckFits(*converted, cast, kAdviceForLoading);
      converted = fits.ok() ? absl::StatusOr<at::Tensor>(cast) : fits;
    }));
    return Annotate(std::move(converted),
                    absl::StrCat(target.name, ", rows ", first_row, " to ",
                                 first_row + rows.size(0) - 1));
  }

  absl::Status ReadPiece(const StoredTensor& stored, int64_t begin,
                         const at::Tensor& values) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                          RunsOf(stored, begin, begin + values.numel()));
    const int64_t item = ItemBytes(stored.info.dtype);
    std::vector<Job> jobs;
    jobs.reserve(runs.size());
    for (const FileRun& run : runs) {
      jobs.push_back(
          {run,
           TensorSink(values.narrow(0, run.target / item, run.bytes / item),
                      *TorchDtype(stored.info.dtype)),
           &stored.info.name});
    }
    return Read(jobs);
  }

  absl::Status Read(std::vector<Job>& jobs) {
    std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) {
      return std::tie(a.place.file, a.place.offset) <
             std::tie(b.place.file, b.place.offset);
    });
    std::vector<FilePlace> ranges;
    ranges.reserve(jobs.size());
    c10::Device device = c10::kCPU;
    for (const Job& job : jobs) {
      ranges.push_back(job.place);
      ranges.back().file += first_file_;
      if (HasStreams(job.sink.device())) device = job.sink.device();
    }
    const auto take = [&](size_t range, int64_t position,
                          absl::Span<const char> bytes) {
      done_ += static_cast<int64_t>(bytes.size());
      if (progress_ != nullptr) progress_(done_, all_);
      const absl::Status taken = jobs[range].sink.Write(position, bytes);
      if (taken.ok()) return absl::OkStatus();
      return Annotate(taken, absl::StrCat(reader_.PathOf(ranges[range].file),
                                          ": ", *jobs[range].name));
    };
    // A device may still copy from what was handed out.
    const auto await_copies = [device] {
      return TorchToStatus("copying to the device", [device] {
        DeviceEvent copied;
        copied.Record(device);
        copied.Wait(absl::InfiniteFuture());
      });
    };
    const absl::Status read = reader_.Read(ranges, take, await_copies);
    const absl::Status copied = await_copies();
    return read.ok() ? copied : read;
  }

  const LoadPlan& plan_;
  const absl::Span<const TensorRange> targets_;
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
  return bytes;
}

absl::Status CompareCopies(const LoadPlan& plan, RangeReader& reader) {
  return Loader(plan, {}, reader, nullptr, /*first_file=*/0).CompareCopies();
}

absl::Status LoadTensors(const LoadPlan& plan,
                         absl::Span<const TensorRange> targets,
                         RangeReader& reader, const LoadProgress& progress,
                         int64_t first_file) {
  return Loader(plan, targets, reader, progress, first_file).Run();
}

RangeReaderOptions ReaderOptionsFor(const RunValues& values, int world_size) {
  const bool is_shared =
      values.sharded() == nullptr
          ? world_size > 1
          : absl::c_any_of(values.model().ranges(), [](const TensorRange& one) {
              return one.replicas > 1;
            });
  RangeReaderOptions options;
  options.caching = is_shared ? Caching::kCached : Caching::kDirectUnlessCached;
  if (HasStreams(values.device())) {
    options.pages = std::make_shared<LockedPages>(values.device());
  }
  return options;
}

}  // namespace fsdp::checkpoint
