// Folders of DCP checkpoints, so that what loads safetensors loads them too.
#ifndef CHECKPOINT_DCP_DCP_CATALOG_H_
#define CHECKPOINT_DCP_DCP_CATALOG_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// What makes a folder a DCP checkpoint.
inline constexpr char kDcpMetadataFile[] = ".metadata";
// The items of a state dict that may be an optimizer's.
inline constexpr absl::string_view kDcpOptimizerItems[] = {"optim",
                                                           "optimizer"};

struct DcpCatalogOptions {
  // The model's tensors alone, by their names in the model. They are those in
  // the state dict's item "model", which may be in another item, {"app":
  // {"model": ...}}, or, as torchtitan and Megatron have it, those at its top.
  bool model_only = false;
  // Then, only tensors whose names begin with it, which they lose.
  std::string prefix;
};

// Which bytes of `folder` its tensors are. Values that are no tensors are left
// out. Opens each file once and makes about two reads of 4 KiB for each chunk
// of a tensor that is asked for, in the order of files and bytes.
// InvalidArgument, naming tensor and file: what ReadDcpMetadata() and
// FindChunkBytes() refuse, a chunk that its file does not have, names that are
// alike without the prefix. NotFound: no `.metadata`, or a file is missing.
absl::StatusOr<Catalog> ReadDcpCatalog(
    FileSystem& files, const std::string& folder,
    const DcpCatalogOptions& options = DcpCatalogOptions());

// The same in steps, for those who want several parts of a folder: what its
// `.metadata` says;
absl::StatusOr<DcpMetadata> ReadDcpFolder(FileSystem& files,
                                          const std::string& folder);
// the model's tensors, by their names in the model, which `metadata` is without
// from then on;
std::vector<DcpTensor> TakeModel(DcpMetadata& metadata);
// whether a tensor of that name is of an optimizer, where names are all there
// is (no `metadata.paths`), as in Megatron's files:
// "optimizer.state.exp_avg.NAME", "chained_0.optimizer.state.exp_avg.NAME". It
// is not among the model's;
bool IsMegatronOptimizer(const DcpMetadata& metadata, absl::string_view name);
// where the bytes of some are. `names`: DcpMetadata::files.
absl::StatusOr<Catalog> FindDcpTensors(FileSystem& files,
                                       const std::string& folder,
                                       const std::vector<std::string>& names,
                                       absl::Span<const DcpTensor> tensors);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_DCP_CATALOG_H_
