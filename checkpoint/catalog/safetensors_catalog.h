// Makes catalogs of checkpoints of safetensors files from the files' headers.
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

// Returns the catalog of all files of a folder without index. Tensors are whole
// or, in files with DCP's sharding info, pieces that must make up the tensors.
// They are in the order of their positions if files have these, otherwise of
// the files. Without "global_shape" a tensor is as large as its pieces reach,
// so that a missing last piece goes unnoticed. InvalidArgument names file and
// tensor.
absl::StatusOr<Catalog> CatalogOfSafetensors(
    absl::Span<const SafetensorsFile> files);

// Returns the catalog of a Hugging Face model with an index, whose tensors are
// whole. `files` are those that the index names; other tensors in them are
// ignored, since they may be another file's or older. InvalidArgument lists all
// files that are missing or that the index does not name, and tensors that are
// not in their file.
absl::StatusOr<Catalog> CatalogOfHuggingFace(
    const FileIndex& index, absl::Span<const SafetensorsFile> files);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_CATALOG_SAFETENSORS_CATALOG_H_
