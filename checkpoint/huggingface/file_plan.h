// Plans where the tensors of a model lie in the files of a Hugging Face model.
// The plan follows from names, dtypes and shapes alone: every rank computes the
// same one, whatever the number of ranks.
#ifndef CHECKPOINT_HUGGINGFACE_FILE_PLAN_H_
#define CHECKPOINT_HUGGINGFACE_FILE_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/safetensors/safetensors_header.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {

struct FilePlanOptions {
  // Names begin with it: "model" gives "model.safetensors".
  std::string stem = "model";
  // Limits the tensors of a file, without its header. A larger tensor has a
  // file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  // The metadata of every file. transformers reads no file without this entry.
  SafetensorsMetadata metadata = {{"format", "pt"}};
};

struct PlannedFile {
  std::string name;    // "model-00001-of-00003.safetensors"
  std::string header;  // the bytes it begins with
  int64_t bytes = 0;   // of the whole file
};

struct PlannedTensor {
  int file = 0;        // in FilePlan::files
  int64_t offset = 0;  // bytes from the beginning of the file
  int64_t bytes = 0;
};

struct FilePlan {
  std::vector<PlannedFile> files;      // at least one
  std::vector<PlannedTensor> tensors;  // in the order given
  int64_t total_bytes = 0;             // of all tensors
  // "model.safetensors.index.json" and its text; empty if there is only one
  // file, which needs no index.
  std::string index_name;
  std::string index;
};

// Fills files in the given order, by the rule of huggingface_hub: a file ends
// before the tensor that would exceed the limit, and no tensor is split. Inside
// a file the order is that of PlaceTensors(). Takes time in proportion to the
// tensors. InvalidArgument: a name is given twice, PlaceTensors() or
// FormatSafetensorsHeader() refuses something, or the stem is no file name.
absl::StatusOr<FilePlan> PlanFiles(absl::Span<const TensorInfo> tensors,
                                   const FilePlanOptions& options = {});

// The index of a Hugging Face model that has several files.

struct FileIndex {
  // The bytes of all tensors, if metadata.total_size says it.
  std::optional<int64_t> total_bytes;
  // Plain names, each once, sorted. The files may be missing.
  std::vector<std::string> files;
  // Each tensor's name, once, and which of `files` has it, in the order of the
  // text.
  std::vector<std::pair<std::string, int>> weights;
};

// InvalidArgument, naming what is wrong: no JSON, no "weight_map", a name given
// twice, a file that CheckPlainFileName() refuses, a total size that is none,
// or more than 10,000 values in another member than "weight_map". Needs at most
// 32 times the text and 4 MiB of memory.
absl::StatusOr<FileIndex> ParseFileIndex(absl::string_view json);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_HUGGINGFACE_FILE_PLAN_H_
