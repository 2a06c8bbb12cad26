// The index of a Hugging Face model that has several files.
#ifndef CHECKPOINT_HUGGINGFACE_FILE_INDEX_H_
#define CHECKPOINT_HUGGINGFACE_FILE_INDEX_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

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

#endif  // CHECKPOINT_HUGGINGFACE_FILE_INDEX_H_
