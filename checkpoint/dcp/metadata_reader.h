// Reads the file `.metadata` of DCP checkpoints.
#ifndef CHECKPOINT_DCP_METADATA_READER_H_
#define CHECKPOINT_DCP_METADATA_READER_H_

#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/dcp/metadata.h"

namespace fsdp::checkpoint {

// As torch 2.0 or newer, torchtitan and Megatron write it. Nothing is executed.
// Time and memory are in proportion to its size.
//
// InvalidArgument, naming the tensor: another format; a class that is not of
// DCP's own or of what Megatron adds; chunks that leave their tensor, overlap
// or leave a part of it out, or are in no file; transformed (compressed)
// chunks; dtypes that safetensors lacks; a file whose path leaves the
// checkpoint's folder.
absl::StatusOr<DcpMetadata> ReadDcpMetadata(std::string bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_METADATA_READER_H_
