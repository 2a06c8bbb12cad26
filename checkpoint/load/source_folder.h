// The files of a checkpoint or a model, and the tensors that they contain.
#ifndef CHECKPOINT_LOAD_SOURCE_FOLDER_H_
#define CHECKPOINT_LOAD_SOURCE_FOLDER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/files/checksums.h"
#include "base/files/file_system.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/format/catalog.h"

namespace fsdp::checkpoint {

// The sizes and checksums that files must have, by their relative names.
using SumsByName = std::map<std::string, FileSums>;

// Names are relative to the folder. Thread-compatible.
class SourceFolder {
 public:
  // `sums` has all files that may be read: others are refused, and those that
  // differ are damaged. Unset: others have written the files, and nothing is
  // known of them. `files` outlives the folder, which outlives its readers.
  SourceFolder(FileSystem& files, std::string root,
               std::optional<SumsByName> sums)
      : files_(files), root_(std::move(root)), sums_(std::move(sums)) {}

  // DataLoss: the file is damaged. InvalidArgument: it is larger than
  // `max_bytes`.
  absl::StatusOr<std::string> ReadText(const std::string& name,
                                       int64_t max_bytes) const;

  std::string PathOf(const std::string& name) const {
    return JoinPath(root_, name);
  }

  // Reads the catalog of the files of one stem: "STEM.safetensors", several
  // with "STEM.safetensors.index.json", or those of ranks, "shard-00001-STEM"
  // and so on. NotFound: there are none.
  absl::StatusOr<Catalog> ReadStem(const std::string& stem) const;

  // Reads the catalog of what there is: an index, "model.safetensors" (before
  // "consolidated...", the same model under other names), or any other
  // safetensors files, such as torch.distributed.checkpoint writes for each
  // rank. NotFound says what was looked for, and what converts the files that
  // are there.
  absl::StatusOr<Catalog> ReadModel() const;
  // Reads the catalog of one file, or of those of an index.
  absl::StatusOr<Catalog> ReadFileOrIndex(const std::string& name) const;

  // Opens the files of `catalogs`, numbered one catalog after the other.
  absl::StatusOr<std::unique_ptr<RangeReader>> Open(
      absl::Span<const Catalog* const> catalogs,
      const RangeReaderOptions& options) const;

 private:
  absl::StatusOr<SourceFile> SourceOf(const std::string& name) const;
  // In the order of `names`. With `skip_missing`, files that are not there are
  // left out.
  absl::StatusOr<std::vector<SafetensorsFile>> ReadHeaders(
      absl::Span<const std::string> names, bool skip_missing) const;
  // Adds the header of file number `file` of `reader`, which begins with
  // `head`.
  absl::Status AddHeader(const std::string& name, int64_t file,
                         std::string head, RangeReader& reader,
                         std::vector<SafetensorsFile>& headers) const;
  absl::StatusOr<Catalog> ReadIndexed(const std::string& index_name) const;
  absl::StatusOr<Catalog> ReadAll(absl::Span<const std::string> names) const;

  FileSystem& files_;
  const std::string root_;
  const std::optional<SumsByName> sums_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_SOURCE_FOLDER_H_
