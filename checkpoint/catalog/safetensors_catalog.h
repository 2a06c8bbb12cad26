// Catalogs of checkpoints whose files are safetensors, from what their headers
// say.
#ifndef CHECKPOINT_CATALOG_SAFETENSORS_CATALOG_H_
#define CHECKPOINT_CATALOG_SAFETENSORS_CATALOG_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/huggingface/file_plan.h"
#include "checkpoint/safetensors/safetensors_header.h"

namespace fsdp::checkpoint {

struct SafetensorsFile {
  std::string name;  // relative to the checkpoint's folder
  SafetensorsHeader header;
};

// Of all files of a folder that has no index: tensors are whole, or, in files
// with DCP's sharding info, pieces, which together have to be the tensors.
// Tensors are in the order of their positions where files say them, else of
// the files. Without "global_shape" a tensor is as large as its pieces reach,
// so that a last piece that is missing is not noticed. InvalidArgument, naming
// file and tensor.
absl::StatusOr<Catalog> CatalogOfSafetensors(
    absl::Span<const SafetensorsFile> files);

// Of a Hugging Face model with an index, whose tensors are whole. `files` are
// those that the index names; what else they have is left alone, as it may be
// another file's or an older one. InvalidArgument lists all at once: files that
// are not there, or that it does not name, and tensors that are missing in the
// file that it names.
absl::StatusOr<Catalog> CatalogOfHuggingFace(
    const FileIndex& index, absl::Span<const SafetensorsFile> files);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_CATALOG_SAFETENSORS_CATALOG_H_
