// Tensors of the CPU over the memory of the fake device, and back. For
// fake_device*.cc only.
#ifndef BASE_TESTING_FAKE_DEVICE_TWINS_H_
#define BASE_TESTING_FAKE_DEVICE_TWINS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <utility>
#include <vector>

#include "base/testing/fake_device_state.h"

namespace fsdp::testing::fake_device {

inline c10::DataPtr& DataOf(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

inline bool Same(const c10::Storage& a, const c10::Storage& b) {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

// Returns a tensor like `like` over another storage.
inline at::Tensor Mirror(const at::Tensor& like, const c10::Storage& storage) {
  const auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU
                                             : c10::DispatchKey::PrivateUse1;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(),
                              like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return tensor;
}

// Takes the memory out of a storage of the CPU, for a new owner.
inline c10::DataPtr TakeMemory(const c10::Storage& storage) {
  c10::DataPtr& data = DataOf(storage);
  c10::DataPtr borrowed(data.get(), storage.device());
  return State::Get().Adopt(std::exchange(data, std::move(borrowed)),
                            storage.nbytes());
}

// The twins of one operator's arguments. Equal tensors and storages have equal
// twins, so that aliases stay aliases on the CPU.
class Twins {
 public:
  explicit Twins(const std::string& name) : name_(name) {}

  // Returns the twin of `tensor`. Tensors of the CPU are their own twins; one
  // that is not a scalar must not be mixed into an operator of the device,
  // which throws.
  at::Tensor Of(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    for (Pair& pair : tensors_) {
      if (!pair.original.is_same(tensor)) continue;
      pair.writes |= writes;
      return pair.twin;
    }
    if (tensor.is_cpu()) {
      TORCH_CHECK(tensor.dim() == 0, name_, ": expected all tensors to be on ",
                  TheDevice(), ", but one is on the CPU");
      tensors_.push_back({tensor, tensor, /*writes=*/false});
      storages_.push_back({tensor.storage(), tensor.storage()});
      return tensor;
    }
    TORCH_CHECK(
        tensor.layout() == at::kStrided && tensor.device() == TheDevice(),
        name_, ": the fake device takes dense tensors of its own, not ",
        tensor.toString());
    at::Tensor twin = Mirror(tensor, Of(tensor.storage()));
    tensors_.push_back({tensor, twin, writes});
    return twin;
  }
  c10::Storage Of(const c10::Storage& storage) {
    for (const StoragePair& pair : storages_) {
      if (Same(pair.original, storage)) return pair.twin;
    }
    c10::Storage twin(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(DataOf(storage).get(), c10::Device(c10::DeviceType::CPU)),
        c10::GetCPUAllocator(), storage.resizable()));
    storages_.push_back({storage, twin});
    return twin;
  }

  // Throws if the storage of `tensor` is armed, as an access does.
  static void CheckAccess(const at::Tensor& tensor, bool writes) {
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    if (writes) {
      (void)storage->mutable_data();
    } else {
      (void)storage->data();
    }
  }

  // Gives the tensors that were to be written the shape, storage and memory
  // that the operator gave to their twins.
  void WriteBack() {
    for (const Pair& pair : tensors_) {
      if (!pair.writes) continue;
      const c10::Storage storage = OriginalOf(pair.twin.storage());
      c10::TensorImpl* const impl = pair.original.unsafeGetTensorImpl();
      if (!Same(storage, pair.original.storage())) {
        impl->set_storage_keep_dtype(storage);
      }
      if (DataOf(pair.twin.storage()).get() != DataOf(storage).get()) {
        DataOf(storage) = TakeMemory(pair.twin.storage());
      }
      if (storage.nbytes() != pair.twin.storage().nbytes()) {
        storage.unsafeGetStorageImpl()->set_nbytes(
            pair.twin.storage().nbytes());
      }
      if (pair.twin.sizes() != pair.original.sizes() ||
          pair.twin.strides() != pair.original.strides() ||
          pair.twin.storage_offset() != pair.original.storage_offset()) {
        impl->set_sizes_and_strides(pair.twin.sizes(), pair.twin.strides(),
                                    pair.twin.storage_offset());
      }
    }
  }

  // Returns the tensor whose twin `result` is: an argument, a view of one, or a
  // new tensor of the device that takes the memory over (`fresh`).
  at::Tensor OriginalOf(const at::Tensor& result, bool& fresh) {
    for (const Pair& pair : tensors_) {
      if (pair.twin.is_same(result)) return pair.original;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == at::kStrided, name_,
        ": gave a tensor that is not dense; the fake device has none of those");
    fresh = true;
    for (const StoragePair& pair : storages_) {
      fresh &= !Same(pair.twin, result.storage());
    }
    return Mirror(result, OriginalOf(result.storage()));
  }

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
  c10::Storage OriginalOf(const c10::Storage& twin) {
    for (const StoragePair& pair : storages_) {
      if (Same(pair.twin, twin)) return pair.original;
    }
    c10::Storage original(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), twin.nbytes(), TakeMemory(twin),
        DeviceAllocator(), /*resizable=*/true));
    storages_.push_back({original, twin});
    return original;
  }

  const std::string name_;
  std::vector<Pair> tensors_;
  std::vector<StoragePair> storages_;
};

}  // namespace fsdp::testing::fake_device

#endif  // BASE_TESTING_FAKE_DEVICE_TWINS_H_
