// Opens whatever has tensors in safetensors files.
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
  kCheckpoint,   // of a run, with a manifest
  kHuggingFace,  // safetensors with whole tensors, an index or not
  kRankFiles,    // safetensors with the pieces of each rank
};

// "a Hugging Face model".
absl::string_view NameOf(Format format);

struct SourceOptions {
  // The model's tensors, by their names in the model, without the optimizer's.
  bool model_only = false;
  // Checksums of the manifest are ignored.
  bool unchecked = false;
};

// Its tensors: those of a checkpoint's optimizer are named after their file,
// "optimizer/exp_avg/layer.weight". What belongs to single ranks is left out.
struct Source {
  FileSystem* files = nullptr;
  std::string path;    // of the folder or the file
  std::string folder;  // to which names of files are relative
  Format format = Format::kHuggingFace;
  std::optional<Manifest> manifest;  // of a checkpoint
  bool unchecked = false;
  Catalog catalog;
};

// Of a run's folder, its latest checkpoint. NotFound, with what was looked for;
// InvalidArgument and DataLoss, naming the file, for what its readers refuse.
absl::StatusOr<Source> OpenSource(FileSystem& files, const std::string& path,
                                  const SourceOptions& options = {});

// Whether its safetensors files have the pieces of single ranks, as
// kRankFiles says of those without a manifest.
bool HasRankFiles(const Source& source);

// Over the files of its catalog; checks what a manifest has the checksums of.
// The source has to outlive it.
absl::StatusOr<std::unique_ptr<RangeReader>> ReaderOf(
    const Source& source, RangeReaderOptions options = {});

// Are these the names in a folder of a run's checkpoints?
bool IsRunFolder(const std::vector<std::string>& names);

// Elements of tensors out of the files in which they lie, in their order and in
// O(buffer) memory.

using TakeBytes = absl::FunctionRef<absl::Status(absl::Span<const char>)>;

// Gives `take` the elements [begin, end) of a tensor, row-major, in pieces of
// whole elements. Elements that do not fill bytes have to be all there are.
// InvalidArgument for others, and the errors of RangeReader and of `take`.
absl::Status StreamElements(RangeReader& reader, const StoredTensor& tensor,
                            int64_t begin, int64_t end, TakeBytes take);

// All of it.
absl::Status StreamTensor(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_SOURCE_H_
