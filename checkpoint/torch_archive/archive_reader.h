// Reads what torch.save() writes.
#ifndef CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_READER_H_
#define CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_READER_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "checkpoint/torch_archive/value.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint {

// The file of torch.save(), 1.6 or newer, that lies at [offset, offset +
// length) of a file. Of tensors, where their bytes are: these are not read.
// Parameters come as tensors, OrderedDict as dict, torch.Size as tuple;
// attributes of theirs are dropped. Takes memory in proportion to what is not
// tensors' bytes.
//
// InvalidArgument for another version or byte order, compressed entries, a
// tensor that leaves its storage, a dtype that safetensors lacks, and values of
// any other class, which is named: nothing is executed.
absl::StatusOr<Value> ReadArchive(const ReadAt& read, int64_t offset,
                                  int64_t length);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_ARCHIVE_READER_H_
