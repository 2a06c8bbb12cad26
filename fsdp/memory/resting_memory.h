// Memory of a shard, its gradient or an optimizer's state, whose bytes may rest
// in a store between uses.
#ifndef FSDP_MEMORY_RESTING_MEMORY_H_
#define FSDP_MEMORY_RESTING_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace fsdp {

namespace flat_param {
class GuardedStorage;
}  // namespace flat_param

class DeviceCopies;
class DeviceEvent;
class OffloadSpace;

// The purposes for which memory is acquired.
enum class Use {
  kRead,       // leaves it as it is
  kUpdate,     // reads and changes
  kOverwrite,  // finds bytes of any value, and writes all of them
};

// A place where bytes rest while nothing uses them. Not thread-safe.
class RestingPlace {
 public:
  virtual ~RestingPlace() = default;
  // Hints that the bytes will be used soon.
  virtual void Prefetch() = 0;
  // Returns their memory on the host, valid until Release(). There is one use
  // at a time.
  virtual absl::StatusOr<char*> Acquire(Use use) = 0;
  // Says that a use for kRead changes the bytes after all.
  virtual void MarkChanged() = 0;
  // Ends the use. A device may use the bytes until it has reached `used`, which
  // may be null; Acquire() does not wait for that.
  virtual void Release(const std::shared_ptr<const DeviceEvent>& used) = 0;
};

// Selects where acquired memory has its values, if the model is on a device.
enum class Where { kDevice, kHost };

// Tensors over this memory keep their identity, but have values only while it
// is acquired; any other access raises `error`, a FailedPrecondition. On a
// device the stream current at Acquire() waits for the values, and work given
// to the stream current at the last Release() may still use them; the host
// waits for neither. Not thread-safe.
class RestingMemory : public std::enable_shared_from_this<RestingMemory> {
 public:
  // `copies` copies to and from the device; null on the CPU. `space` owns the
  // memory; may be null.
  RestingMemory(int64_t bytes, c10::Device device, const std::string& error,
                std::unique_ptr<RestingPlace> place,
                std::shared_ptr<DeviceCopies> copies,
                std::shared_ptr<OffloadSpace> space);
  // Lies over `memory`, which stays where it is: acquiring costs nothing.
  RestingMemory(at::Tensor memory, std::shared_ptr<OffloadSpace> space);
  // Tensors that outlive it raise an error when they are used.
  ~RestingMemory();

  // Returns the memory that `tensor` lies in, or null.
  static RestingMemory* Of(const at::Tensor& tensor);

  // Returns all of it as a 1-D tensor.
  at::Tensor AsTensor(c10::ScalarType dtype) const;
  // Returns a tensor on the host for the bytes of `tensor`, which lies in this
  // memory; it has values while they are acquired there. On the CPU, and if the
  // memory stays on its device, it is `tensor` itself.
  at::Tensor OnHost(const at::Tensor& tensor);
  int64_t bytes() const { return bytes_; }  // the size of all of it
  // Returns whether it is always in memory.
  bool stays() const { return place_ == nullptr; }
  // Returns whether it is acquired; false if it stays.
  bool in_use() const { return (uses_ > 0 || host_uses_ > 0) && !stays(); }
  // The space that owns the memory, or null.
  const std::shared_ptr<OffloadSpace>& space() const { return space_; }

  // Hints that it will be acquired soon.
  void Prefetch();
  // Gives the tensors values until Release(). Pairs may be nested, each with
  // its own use. With kHost it waits for the device's copies.
  // FailedPrecondition: the memory is in use on the other side.
  absl::Status Acquire(Use use, Where where = Where::kDevice);
  // If the device cannot copy back, the next Acquire() returns the error.
  void Release(Where where = Where::kDevice);

 private:
  absl::Status BringToDevice(Use use);
  absl::Status BringToHost(Use use);
  bool IsOnHost(Where where) const;
  flat_param::GuardedStorage& HostStorage();

  const int64_t bytes_;
  const std::unique_ptr<flat_param::GuardedStorage> storage_;
  const std::unique_ptr<RestingPlace> place_;
  const std::shared_ptr<DeviceCopies> copies_;
  at::Tensor memory_;   // on the device, or what stays
  at::Tensor on_host_;  // the place's memory, while it is on the device
  std::shared_ptr<const DeviceEvent>
      arrived_;  // the copy to the device is done
  std::shared_ptr<const DeviceEvent>
      used_;  // the device has done with the host's memory
  int uses_ = 0;
  // The storage of OnHost(); null until it is called.
  std::unique_ptr<flat_param::GuardedStorage> host_storage_;
  int host_uses_ = 0;
  const std::string error_;
  bool changed_ = false;
  absl::Status lost_;  // what was changed did not reach its place
  const std::shared_ptr<OffloadSpace> space_;
};

// Acquires the memory of tensors for as long as it lives. Tensors that are
// undefined, or lie in ordinary memory, need nothing.
class Resident {
 public:
  Resident() = default;
  // Acquires the memory of these, as RestingMemory::Acquire() does; after an
  // error, none.
  static absl::StatusOr<Resident> Of(absl::Span<const at::Tensor> tensors,
                                     Use use, Where where = Where::kDevice);
  static absl::StatusOr<Resident> Of(const at::Tensor& tensor, Use use,
                                     Where where = Where::kDevice) {
    return Of(absl::MakeConstSpan(&tensor, 1), use, where);
  }
  Resident(Resident&& other) noexcept = default;
  Resident& operator=(Resident&& other) noexcept;
  ~Resident();

  // Acquires the memory of one more tensor.
  absl::Status Add(const at::Tensor& tensor, Use use,
                   Where where = Where::kDevice);

 private:
  struct Held {
    std::shared_ptr<RestingMemory> memory;
    Where where;
  };
  std::vector<Held> held_;
};

// Returns RestingMemory::OnHost(), or `tensor` itself if it lies in ordinary
// memory.
at::Tensor OnHost(const at::Tensor& tensor);

// Returns whether the values of `tensor` rest off its device between uses.
bool RestsElsewhere(const at::Tensor& tensor);
// Hints that `tensor` will be used soon.
void PrefetchTensor(const at::Tensor& tensor);

}  // namespace fsdp

#endif  // FSDP_MEMORY_RESTING_MEMORY_H_
