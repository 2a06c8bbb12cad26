// The data.pkl of a torch.save() file.
#ifndef CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_PICKLE_H_
#define CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_PICKLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/torch_archive/value.h"

namespace fsdp::checkpoint {

struct ArchivePickle {
  std::string bytes;
  // Of the storages "0", "1", ...: one for each tensor.
  std::vector<int64_t> storage_bytes;
};

// InvalidArgument as of ArchiveLayout::Create().
absl::StatusOr<ArchivePickle> PickleArchive(const Value& value);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_PICKLE_H_
