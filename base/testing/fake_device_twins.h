// Tensors of the CPU over the memory of the fake device, and back. For
// fake_device*.cc only.
#ifndef BASE_TESTING_FAKE_DEVICE_TWINS_H_
#define BASE_TESTING_FAKE_DEVICE_TWINS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

namespace fsdp::testing::fake_device {

// The twins of one operator's arguments. Equal tensors and storages have equal
// twins, so that aliases stay aliases on the CPU.
class Twins {
 public:
  explicit Twins(const std::string& name) : name_(name) {}

  // Returns the twin of `tensor`. Tensors of the CPU are their own twins; one
  // that is not a scalar must not be mixed into an operator of the device,
  // which throws.
  at::Tensor Of(const at::Tensor& tensor, bool writes);
  c10::Storage Of(const c10::Storage& storage);

  // Throws if the storage of `tensor` is armed, as an access does.
  static void CheckAccess(const at::Tensor& tensor, bool writes);

  // Gives the tensors that were to be written the shape, storage and memory
  // that the operator gave to their twins.
  void WriteBack();

  // Returns the tensor whose twin `result` is: an argument, a view of one, or a
  // new tensor of the device that takes the memory over (`fresh`).
  at::Tensor OriginalOf(const at::Tensor& result, bool& fresh);

 private:
  struct Pair {
    at::Tensor original;
    at::Tensor twin;
    bool writes = false;
  };
  struct StoragePair {
    c10::Storage original;
    c10::Storage twin;
  };

  // Returns the storage whose twin that is, or a new one that takes its memory
  // over.
  c10::Storage OriginalOf(const c10::Storage& twin);

  const std::string name_;
  std::vector<Pair> tensors_;
  std::vector<StoragePair> storages_;
};

}  // namespace fsdp::testing::fake_device

#endif  // BASE_TESTING_FAKE_DEVICE_TWINS_H_
