// Opens anything that has tensors in safetensors files.
#ifndef TOOLS_CHECKPOINT_SOURCE_H_
#define TOOLS_CHECKPOINT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"

namespace fsdp::checkpoint::tool {

enum class Format {
  kCheckpoint,   // a checkpoint of a run, with a manifest
  kHuggingFace,  // safetensors with whole tensors, with or without an index
  kRankFiles,    // safetensors with the pieces of each rank
};

// Returns "a Hugging Face model", for example.
absl::string_view NameOf(Format format);

struct SourceOptions {
  // If true, only the model's tensors, by their names in the model.
  bool model_only = false;
  // If true, the checksums of the manifest are ignored.
  bool unchecked = false;
};

// The tensors of a path. Those of a checkpoint's optimizer are named after
// their file, "optimizer/exp_avg/layer.weight". Values of single ranks are left
// out.
struct Source {
  FileSystem* files = nullptr;
  std::string path;    // of the folder or the file
  std::string folder;  // file names are relative to it
  Format format = Format::kHuggingFace;
  std::optional<Manifest> manifest;  // only of a checkpoint
  bool unchecked = false;
  Catalog catalog;
};

// Opens `path`, or the latest checkpoint of a run's folder. NotFound says what
// was looked for; InvalidArgument and DataLoss name the file that its reader
// refuses.
absl::StatusOr<Source> OpenSource(FileSystem& files, const std::string& path,
                                  const SourceOptions& options = {});

// Returns whether its safetensors files have the pieces of single ranks.
// Without a manifest that is kRankFiles.
bool HasRankFiles(const Source& source);

// Opens the files of its catalog, and verifies them if a manifest has their
// checksums. The source outlives the reader.
absl::StatusOr<std::unique_ptr<RangeReader>> ReaderOf(
    const Source& source, RangeReaderOptions options = {});

// Returns whether a folder with these names is one of a run's checkpoints.
bool IsRunFolder(const std::vector<std::string>& names);

// Reading the elements of tensors from files, in order and in O(buffer) memory.

using TakeBytes = absl::FunctionRef<absl::Status(absl::Span<const char>)>;

// Gives `take` the elements [begin, end) of a tensor, row-major, in pieces of
// whole elements. InvalidArgument: elements that do not fill bytes are asked
// for in part. Other errors are those of RangeReader and of `take`.
absl::Status StreamElements(RangeReader& reader, const StoredTensor& tensor,
                            int64_t begin, int64_t end, TakeBytes take);

// Gives `take` all elements.
absl::Status StreamTensor(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_SOURCE_H_
