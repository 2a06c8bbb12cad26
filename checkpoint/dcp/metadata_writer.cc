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

using ChunksByTensor = std::vector<std::vector<Stored>>;  // by rank

ChunksByTensor ChunksOf(size_t tensors, absl::Span<const DcpRankFile> files) {
  ChunksByTensor chunks(tensors);
  for (const DcpRankFile& file : files) {
    for (const DcpFileChunk& chunk : file.chunks) {
      chunks[static_cast<size_t>(chunk.tensor)].push_back({&file, &chunk});
    }
  }
  return chunks;
}

absl::Status Check(absl::Span<const DcpWriteTensor> tensors,
                   const ChunksByTensor& chunks) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& info = tensors[i].info;
    std::vector<Box> boxes;
    size_t empty = 0;
    for (const Stored& stored : chunks[i]) {
      boxes.push_back(stored.chunk->box);
      if (boxes.back().Numel() == 0) ++empty;
    }
    absl::Status check = CheckTiles(info.shape, boxes);
    if (check.ok() && empty > 1) {
      check =
          absl::InvalidArgumentError("has no elements and is in several files");
    }
    if (!check.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", info.name, "\": ", check.message()));
    }
  }
  return absl::OkStatus();
}

// --- Objects of Python as they are pickled ----------------------------------

// ("module.name" up to its last dot is the module.)
void Global(absl::string_view name, Pickler& pickler) {
  const size_t dot = name.rfind('.');
  pickler.Global(name.substr(0, dot), name.substr(dot + 1));
}

// An object without a state.
void Object(absl::string_view name, Pickler& pickler) {
  Global(name, pickler);
  pickler.EmptyTuple();
  pickler.NewObj();
}

// The state of the object, a dict: its items come between.
void State(Pickler& pickler) {
  pickler.EmptyDict();
  pickler.Mark();
}

void EndState(Pickler& pickler) {
  pickler.SetItems();
  pickler.Build();
}

void Size(absl::Span<const int64_t> sizes, Pickler& pickler) {
  Global(dcp_names::kSize, pickler);
  pickler.Mark();
  pickler.Mark();
  for (const int64_t size : sizes) pickler.Int(size);
  pickler.Tuple();
  pickler.Tuple();
  pickler.Reduce();
}

// (dtype, layout, requires_grad, memory format, pin_memory).
void Properties(Dtype dtype, Pickler& pickler) {
  Object(dcp_names::kProperties, pickler);
  pickler.Mark();
  pickler.Global("torch", TorchDtypeOf(dtype)->name);
  Global(dcp_names::kLayout, pickler);
  pickler.Mark();
  pickler.String("torch.strided");
  pickler.Tuple();
  pickler.Reduce();
  pickler.Bool(false);
  Global(dcp_names::kMemoryFormat, pickler);
  pickler.Mark();
  pickler.Int(0);  // contiguous
  pickler.Tuple();
  pickler.Reduce();
  pickler.Bool(false);
  pickler.Tuple();
  pickler.Build();
}

void Path(const DcpPath& path, Pickler& pickler) {
  pickler.String(DcpName(path));
  pickler.Mark();
  for (const auto& key : path) {
    if (const auto* const text = std::get_if<std::string>(&key)) {
      pickler.String(*text);
    } else {
      pickler.Int(std::get<int64_t>(key));
    }
  }
  pickler.Tuple();
}

class Writer {
 public:
  Writer(absl::Span<const DcpWriteTensor> tensors,
         absl::Span<const DcpWriteValue> values,
         absl::Span<const DcpRankFile> files, const ChunksByTensor& chunks)
      : tensors_(tensors), values_(values), files_(files), chunks_(chunks) {}

  std::string Write() && {
    Object(dcp_names::kMetadata, pickler_);
    State(pickler_);
    pickler_.String("state_dict_metadata");
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const DcpWriteValue& value : values_) {
      pickler_.String(DcpName(value.path));
      Object(dcp_names::kBytes, pickler_);
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
    EndState(pickler_);
    return std::move(pickler_).Finish();
  }

 private:
  void Tensor(size_t i) {
    const TensorInfo& info = tensors_[i].info;
    pickler_.String(info.name);
    Object(dcp_names::kTensor, pickler_);
    State(pickler_);
    pickler_.String("properties");
    Properties(info.dtype, pickler_);
    pickler_.String("size");
    Size(info.shape, pickler_);
    pickler_.String("chunks");
    pickler_.EmptyList();
    pickler_.Mark();
    for (const Stored& stored : chunks_[i]) {
      Object(dcp_names::kChunk, pickler_);
      State(pickler_);
      pickler_.String("offsets");
      Size(stored.chunk->box.offsets, pickler_);
      pickler_.String("sizes");
      Size(stored.chunk->box.sizes, pickler_);
      EndState(pickler_);
    }
    pickler_.Appends();
    EndState(pickler_);
  }

  void Paths() {
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const DcpWriteValue& value : values_) Path(value.path, pickler_);
    for (const DcpWriteTensor& tensor : tensors_) Path(tensor.path, pickler_);
    pickler_.SetItems();
  }

  void Place(const std::string& file, int64_t offset, int64_t length) {
    Object(dcp_names::kStorageInfo, pickler_);
    State(pickler_);
    pickler_.String("relative_path");
    pickler_.String(file);
    pickler_.String("offset");
    pickler_.Int(offset);
    pickler_.String("length");
    pickler_.Int(length);
    EndState(pickler_);
  }

  void Places() {
    pickler_.EmptyDict();
    pickler_.Mark();
    for (const DcpRankFile& file : files_) {
      for (const DcpFileValue& value : file.values) {
        Object(dcp_names::kIndex, pickler_);
        State(pickler_);
        pickler_.String("fqn");
        pickler_.String(value.name);
        pickler_.String("index");
        pickler_.None();
        EndState(pickler_);
        Place(file.name, value.offset,
              static_cast<int64_t>(value.bytes.size()));
      }
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      for (size_t j = 0; j < chunks_[i].size(); ++j) {
        const Stored& stored = chunks_[i][j];
        Object(dcp_names::kIndex, pickler_);
        State(pickler_);
        pickler_.String("fqn");
        pickler_.String(tensors_[i].info.name);
        pickler_.String("index");
        pickler_.Int(static_cast<int64_t>(j));
        pickler_.String("offset");
        Size(stored.chunk->box.offsets, pickler_);
        EndState(pickler_);
        Place(stored.file->name, stored.chunk->offset, stored.chunk->length);
      }
    }
    pickler_.SetItems();
  }

  const absl::Span<const DcpWriteTensor> tensors_;
  const absl::Span<const DcpWriteValue> values_;
  const absl::Span<const DcpRankFile> files_;
  const ChunksByTensor& chunks_;
  Pickler pickler_{4};
};

}  // namespace

absl::StatusOr<std::string> DcpMetadataBytes(
    absl::Span<const DcpWriteTensor> tensors,
    absl::Span<const DcpWriteValue> values,
    absl::Span<const DcpRankFile> files) {
  const ChunksByTensor chunks = ChunksOf(tensors.size(), files);
  FSDP_RETURN_IF_ERROR(Check(tensors, chunks));
  return Writer(tensors, values, files, chunks).Write();
}

}  // namespace fsdp::checkpoint
