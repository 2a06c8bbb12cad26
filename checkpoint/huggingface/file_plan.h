// Where the tensors of a model lie when its files are those of a Hugging Face
// model. All of it follows from names, dtypes and shapes: every rank computes
// the same plan, and the number of ranks has no part in it.
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
  // Of the names: "model" for "model.safetensors".
  std::string stem = "model";
  // Of tensors, without the header. A larger tensor has a file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  // Of every file. transformers reads none without this entry.
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
  // "model.safetensors.index.json" and its text; empty where there is only one
  // file, which needs no index.
  std::string index_name;
  std::string index;
};

// Fills files in the order given, by the rule of huggingface_hub: a file ends
// before the tensor that would exceed the limit, and no tensor is split.
// Inside a file PlaceTensors() has its order. Takes time in proportion to the
// tensors. InvalidArgument: a name given twice, what PlaceTensors() and
// FormatSafetensorsHeader() refuse, and a stem that is no file name.
absl::StatusOr<FilePlan> PlanFiles(absl::Span<const TensorInfo> tensors,
                                   const FilePlanOptions& options = {});

// The index of a Hugging Face model that has several files.

struct FileIndex {
  // As metadata.total_size says, where it does: bytes of all tensors.
  std::optional<int64_t> total_bytes;
  // Plain names, each once, sorted. Whether they exist is not known.
  std::vector<std::string> files;
  // The name of each tensor, once, and which of `files` has it; in the order of
  // the text.
  std::vector<std::pair<std::string, int>> weights;
};

// InvalidArgument, naming what is wrong: no JSON, no "weight_map", names given
// twice, files that CheckPlainFileName() refuses, a total size that is none.
// Also for more than 10,000 values in a member other than "weight_map". Memory
// is bounded by 32 times the text and 4 MiB.
absl::StatusOr<FileIndex> ParseFileIndex(absl::string_view json);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_HUGGINGFACE_FILE_PLAN_H_
