#include "fsdp/precision/buffer_precision.h"

#include <utility>
#include <vector>

#include "base/normal_mode.h"

namespace fsdp {
namespace {

void Convert(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (tensor.scalar_type() == dtype) return;
  const NormalMode normal;
  tensor.set_data(tensor.to(dtype));
}

}  // namespace

BufferPrecision::BufferPrecision(std::vector<Buffer> buffers)
    : buffers_(std::move(buffers)) {}

void BufferPrecision::Cast() const {
  for (const Buffer& buffer : buffers_) Convert(buffer.tensor, buffer.wanted);
}

void BufferPrecision::Restore() const {
  for (const Buffer& buffer : buffers_) {
    Convert(buffer.tensor, buffer.original);
  }
}

}  // namespace fsdp
