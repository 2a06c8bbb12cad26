// Tensors of a source as they are to be written: chosen, renamed and cast.
#ifndef TOOLS_CHECKPOINT_CAST_READER_H_
#define TOOLS_CHECKPOINT_CAST_READER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"
#include "tools/checkpoint/progress.h"
#include "tools/checkpoint/source.h"
#include "tools/checkpoint/tensor_stream.h"

namespace fsdp::checkpoint::tool {

// Used by one thread.
class CastReader {
 public:
  // Of tensors whose names begin with `prefix`, which they lose; those of
  // floats become `dtype`, where there is one. `source` outlives it.
  // InvalidArgument: no such name, a dtype that is no float's, tensors that
  // cannot be read.
  static absl::StatusOr<CastReader> Create(const Source& source,
                                           const std::string& prefix,
                                           std::optional<Dtype> dtype,
                                           OnBytes progress);

  // As they are to be written.
  const std::vector<TensorInfo>& infos() const { return infos_; }
  // Of all of them.
  int64_t bytes() const { return bytes_; }

  // The elements [begin, end) of one of infos(). InvalidArgument: a finite one
  // would become infinite.
  absl::Status Read(size_t tensor, int64_t begin, int64_t end, TakeBytes take);
  // All elements.
  absl::Status Read(size_t tensor, TakeBytes take);

 private:
  CastReader() = default;

  std::vector<const StoredTensor*> tensors_;
  std::vector<TensorInfo> infos_;
  int64_t bytes_ = 0;
  std::unique_ptr<RangeReader> reader_;
  OnBytes progress_;
  int64_t done_ = 0;  // bytes of the source
  int64_t total_ = 0;
  std::string cast_;  // a buffer
};

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_CAST_READER_H_
