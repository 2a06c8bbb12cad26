// DcpMetadataBytes().
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/names.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/pickle/pickler.h"
#include "checkpoint/tensor/boxes.h"
#include "checkpoint/torch_archive/torch_dtype.h"

namespace fsdp::checkpoint {
namespace {

// A chunk in the file of a rank.
struct Stored {
  const DcpRankFile* file;
  const DcpFileChunk* chunk;
};

class Writer {
 public:
  Writer(absl::Span<const DcpWriteTensor> tensors,
         absl::Span<const DcpWriteValue> values,
         absl::Span<const DcpRankFile> files)
      : tensors_(tensors),
        values_(values),
        files_(files),
        chunks_(tensors.size()) {
    for (const DcpRankFile& file : files) {
      for (const DcpFileChunk& chunk : file.chunks) {
        chunks_[static_cast<size_t>(chunk.tensor)].push_back({&file, &chunk});
      }
    }
  }

  absl::Status Check() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const TensorInfo& info = tensors_[i].info;
      std::vector<Box> boxes;
      size_t empty = 0;
      for (const Stored& stored : chunks_[i]) {
        boxes.push_back(stored.chunk->box);
        if (boxes.back().Numel() == 0) ++empty;
      }
      absl::Status check = CheckTiles(info.shape, boxes);
      if (check.ok() && empty > 1) {
        check = absl::InvalidArgumentError(
            "has no elements and is in several files");
      }
      if (!check.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor \"", info.name, "\": ", check.message()));
      }
    }
    return absl::OkStatus();
  }

  std::string Write() && {
    Object(dcp_names::kMetadata);
    State();
    pickler_.String("state_dict_metadata");
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const DcpWriteValue& value : values_) {
      pickler_.String(DcpName(value.path));
      Object(dcp_names::kBytes);
    }
    for (size_t i = 0; i < tensors_.size(); ++i) Tensor(i);
    pickler_.SetItems();
    pickler_.String("planner_data");
    Paths();
    pickler_.String("storage_data");
    Places();
    pickler_.String("storage_meta");
    pickler_.None();
    pickler_.String("version");
    pickler_.String("1.0.0");
    EndState();
    return std::move(pickler_).Finish();
  }

 private:
  // ("module.name" up to its last dot is the module.)
  void Global(absl::string_view name) {
    const size_t dot = name.rfind('.');
    pickler_.Global(name.substr(0, dot), name.substr(dot + 1));
  }

  // An object without a state.
  void Object(absl::string_view name) {
    Global(name);
    pickler_.EmptyTuple();
    pickler_.NewObj();
  }
  // The state of the object, a dict: its items come between.
  void State() {
    pickler_.EmptyDict();
    pickler_.Mark();
  }
  void EndState() {
    pickler_.SetItems();
    pickler_.Build();
  }

  void Size(absl::Span<const int64_t> sizes) {
    Global(dcp_names::kSize);
    pickler_.Mark();
    pickler_.Mark();
    for (const int64_t size : sizes) pickler_.Int(size);
    pickler_.Tuple();
    pickler_.Tuple();
    pickler_.Reduce();
  }

  void Tensor(size_t i) {
    const TensorInfo& info = tensors_[i].info;
    pickler_.String(info.name);
    Object(dcp_names::kTensor);
    State();
    pickler_.String("properties");
    Properties(info.dtype);
    pickler_.String("size");
    Size(info.shape);
    pickler_.String("chunks");
    pickler_.EmptyList();
    pickler_.Mark();
    for (const Stored& stored : chunks_[i]) {
      Object(dcp_names::kChunk);
      State();
      pickler_.String("offsets");
      Size(stored.chunk->box.offsets);
      pickler_.String("sizes");
      Size(stored.chunk->box.sizes);
      EndState();
    }
    pickler_.Appends();
    EndState();
  }

  // (dtype, layout, requires_grad, memory format, pin_memory).
  void Properties(Dtype dtype) {
    Object(dcp_names::kProperties);
    pickler_.Mark();
    pickler_.Global("torch", TorchDtypeOf(dtype)->name);
    Global(dcp_names::kLayout);
    pickler_.Mark();
    pickler_.String("torch.strided");
    pickler_.Tuple();
    pickler_.Reduce();
    pickler_.Bool(false);
    Global(dcp_names::kMemoryFormat);
    pickler_.Mark();
    pickler_.Int(0);  // contiguous
    pickler_.Tuple();
    pickler_.Reduce();
    pickler_.Bool(false);
    pickler_.Tuple();
    pickler_.Build();
  }

  void Path(const DcpPath& path) {
    pickler_.String(DcpName(path));
    pickler_.Mark();
    for (const auto& key : path) {
      if (const auto* const text = std::get_if<std::string>(&key)) {
        pickler_.String(*text);
      } else {
        pickler_.Int(std::get<int64_t>(key));
      }
    }
    pickler_.Tuple();
  }

  void Paths() {
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const DcpWriteValue& value : values_) Path(value.path);
    for (const DcpWriteTensor& tensor : tensors_) Path(tensor.path);
    pickler_.SetItems();
  }

  void Place(const std::string& file, int64_t offset, int64_t length) {
    Object(dcp_names::kStorageInfo);
    State();
    pickler_.String("relative_path");
    pickler_.String(file);
    pickler_.String("offset");
    pickler_.Int(offset);
    pickler_.String("length");
    pickler_.Int(length);
    EndState();
  }

  void Places() {
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const DcpRankFile& file : files_) {
      for (const DcpFileValue& value : file.values) {
        Object(dcp_names::kIndex);
        State();
        pickler_.String("fqn");
        pickler_.String(value.name);
        pickler_.String("index");
        pickler_.None();
        EndState();
        Place(file.name, value.offset,
              static_cast<int64_t>(value.bytes.size()));
      }
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      for (size_t j = 0; j < chunks_[i].size(); ++j) {
        const Stored& stored = chunks_[i][j];
        Object(dcp_names::kIndex);
        State();
        pickler_.String("fqn");
        pickler_.String(tensors_[i].info.name);
        pickler_.String("index");
        pickler_.Int(static_cast<int64_t>(j));
        pickler_.String("offset");
        Size(stored.chunk->box.offsets);
        EndState();
        Place(stored.file->name, stored.chunk->offset, stored.chunk->length);
      }
    }
    pickler_.SetItems();
  }

  const absl::Span<const DcpWriteTensor> tensors_;
  const absl::Span<const DcpWriteValue> values_;
  const absl::Span<const DcpRankFile> files_;
  std::vector<std::vector<Stored>> chunks_;  // by tensor, by rank
  Pickler pickler_{4};
};

}  // namespace

absl::StatusOr<std::string> DcpMetadataBytes(
    absl::Span<const DcpWriteTensor> tensors,
    absl::Span<const DcpWriteValue> values,
    absl::Span<const DcpRankFile> files) {
  Writer writer(tensors, values, files);
  FSDP_RETURN_IF_ERROR(writer.Check());
  return std::move(writer).Write();
}

}  // namespace fsdp::checkpoint
