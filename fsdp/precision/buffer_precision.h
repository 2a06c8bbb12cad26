// Casts the buffers of a model to the dtypes of mixed precision, and back.
#ifndef FSDP_PRECISION_BUFFER_PRECISION_H_
#define FSDP_PRECISION_BUFFER_PRECISION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

namespace fsdp {

// Each buffer has a dtype of its own. Tensors keep their identity. Values are
// rounded when they are cast, and stay rounded. Not thread-safe.
class BufferPrecision {
 public:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    c10::ScalarType original;
    c10::ScalarType wanted;
  };

  BufferPrecision() = default;
  explicit BufferPrecision(std::vector<Buffer> buffers);

  void Cast() const;     // to the wanted dtypes
  void Restore() const;  // to the original dtypes

  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  std::vector<Buffer> buffers_;
};

}  // namespace fsdp

#endif  // FSDP_PRECISION_BUFFER_PRECISION_H_
