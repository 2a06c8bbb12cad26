// The files of a checkpoint or a model, and what they say they have.
#ifndef CHECKPOINT_LOAD_SOURCE_FOLDER_H_
#define CHECKPOINT_LOAD_SOURCE_FOLDER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/catalog/safetensors_catalog.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_reader.h"

namespace fsdp::checkpoint {

// The sizes and checksums that files should have, by their relative names.
using SumsByName = std::map<std::string, FileSums>;

// Names are relative to the folder. Thread-compatible.
class SourceFolder {
 public:
  // `sums`: of all files that may be read; what is not there is refused, and
  // what differs is damaged. Null: of files that others have written, of which
  // nothing is known. Both outlive the folder.
  SourceFolder(FileSystem& files, std::string root, const SumsByName* sums)
      : files_(files), root_(std::move(root)), sums_(sums) {}

  const std::string& root() const { return root_; }

  // DataLoss for what is damaged; InvalidArgument for a file that is larger
  // than `max_bytes`.
  absl::StatusOr<std::string> ReadText(const std::string& name,
                                       int64_t max_bytes) const;

  // An error about what a file says, with its path in front.
  absl::Status InFile(const std::string& name,
                      const absl::Status& status) const;

  // Reads what the files of one stem have: "STEM.safetensors", several with
  // "STEM.safetensors.index.json", or those of ranks, "shard-00001-STEM" and so
  // on. NotFound: none is there.
  absl::StatusOr<Catalog> ReadStem(const std::string& stem) const;

  // Reads what there is: an index, "model.safetensors" (before
  // "consolidated...", the same model under other names), or any other
  // safetensors files, such as torch.distributed.checkpoint writes for each
  // rank. NotFound, with what was looked for, and what converts what is there.
  absl::StatusOr<Catalog> ReadModel() const;
  // Reads one file, or those of an index.
  absl::StatusOr<Catalog> ReadFileOrIndex(const std::string& name) const;

  // Over the files of `catalog`, by their numbers.
  absl::StatusOr<std::unique_ptr<RangeReader>> Open(
      const Catalog& catalog, const RangeReaderOptions& options) const;
  // Over those of several, one catalog's behind the other's.
  absl::StatusOr<std::unique_ptr<RangeReader>> OpenAll(
      absl::Span<const Catalog* const> catalogs,
      const RangeReaderOptions& options) const;

 private:
  absl::StatusOr<SourceFile> SourceOf(const std::string& name) const;
  // In the order of `names`, without files that are not there if
  // `skip_missing`.
  absl::StatusOr<std::vector<SafetensorsFile>> ReadHeaders(
      absl::Span<const std::string> names, bool skip_missing) const;
  // Adds that of number `file` of `reader`, which begins with `head`.
  absl::Status AddHeader(const std::string& name, int64_t file,
                         std::string head, RangeReader& reader,
                         std::vector<SafetensorsFile>& headers) const;
  absl::StatusOr<Catalog> ReadIndexed(const std::string& index_name) const;
  // Files of ranks; maybe none.
  absl::StatusOr<std::vector<std::string>> ShardsOf(
      const std::string& stem) const;
  absl::StatusOr<Catalog> ReadAll(absl::Span<const std::string> names) const;
  FileSystem& files_;
  const std::string root_;
  const SumsByName* const sums_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_SOURCE_FOLDER_H_
