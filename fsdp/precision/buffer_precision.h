// The buffers of a model in the dtype that mixed precision wants.
#ifndef FSDP_PRECISION_BUFFER_PRECISION_H_
#define FSDP_PRECISION_BUFFER_PRECISION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

namespace fsdp {

// Floating-point buffers, each with a dtype of its own choice. Tensors keep
// their identity, values are rounded when cast and stay so. Not thread-safe.
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
