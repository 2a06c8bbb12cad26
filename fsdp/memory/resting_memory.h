// Memory in which a shard, its gradient or an optimizer's state rests. What it
// holds may lie in a store between uses.
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
#include "base/device_streams.h"
#include "flat_param/guarded_storage.h"

namespace fsdp {

class DeviceCopies;
class OffloadSpace;

enum class Use {
  kRead,
  kUpdate,     // reads and changes
  kOverwrite,  // the bytes are of any value at first, and all are written
};

// Where bytes are while nothing uses them. Not thread-safe.
class RestingPlace {
 public:
  virtual ~RestingPlace() = default;
  // A hint that they are used soon.
  virtual void Prefetch() = 0;
  // Their memory on the host, until Release(); in use once at a time.
  virtual absl::StatusOr<char*> Acquire(Use use) = 0;
  // In use for kRead, they are changed after all.
  virtual void MarkChanged() = 0;
  // A device may use them until it has reached `used`, which may be null;
  // Acquire() does not wait for that.
  virtual void Release(const SharedEvent& used) = 0;
};

// Where values are wanted of memory that a device uses.
enum class Where { kDevice, kHost };

// Tensors over it keep their identity, but only while it is acquired they have
// values: any other access raises `error`, a FailedPrecondition. On a device
// the stream that is current at Acquire() waits for them, and what the one that
// is current at the last Release() has been given may still use them; the host
// waits for neither. Not thread-safe.
class RestingMemory : public std::enable_shared_from_this<RestingMemory> {
 public:
  // `copies`: to and from the device; null on the CPU. `space`: whose memory
  // this is, as space() says; may be null.
  RestingMemory(int64_t bytes, c10::Device device, const std::string& error,
                std::unique_ptr<RestingPlace> place,
                std::shared_ptr<DeviceCopies> copies,
                std::shared_ptr<OffloadSpace> space);
  // Over `memory`, which stays: acquiring costs nothing.
  RestingMemory(at::Tensor memory, std::shared_ptr<OffloadSpace> space);
  // Tensors may outlive it: they raise the error from then on.
  ~RestingMemory();

  // The one that `tensor` lies in; null for other tensors.
  static RestingMemory* Of(const at::Tensor& tensor);

  // All of it, 1-D.
  at::Tensor AsTensor(c10::ScalarType dtype) const;
  // `tensor`, which lies in it, on the host: the same bytes, which have values
  // while they are acquired there. On the CPU and in memory that stays on its
  // device, `tensor` itself.
  at::Tensor OnHost(const at::Tensor& tensor);
  int64_t bytes() const { return storage_.bytes(); }
  // Whether it is always in memory.
  bool stays() const { return place_ == nullptr; }
  // Whether it is acquired, where that is needed.
  bool in_use() const { return (uses_ > 0 || host_uses_ > 0) && !stays(); }
  const std::shared_ptr<OffloadSpace>& space() const { return space_; }

  void Prefetch();
  // Pairs may be nested, each for its own use. On the host it waits for what
  // the device has been given; FailedPrecondition: in use on the other side.
  absl::Status Acquire(Use use, Where where = Where::kDevice);
  // What a device could not give back is the error of the next Acquire().
  void Release(Where where = Where::kDevice);

 private:
  absl::Status BringIn(Use use);
  absl::Status BringToDevice(Use use);
  absl::Status BringToHost(Use use);
  bool IsOnHost(Where where) const;
  flat_param::GuardedStorage& HostStorage();

  flat_param::GuardedStorage storage_;
  const std::unique_ptr<RestingPlace> place_;
  const std::shared_ptr<DeviceCopies> copies_;
  at::Tensor memory_;    // on the device, where the place's is not there
  at::Tensor on_host_;   // the place's, while acquired
  SharedEvent arrived_;  // on the device
  SharedEvent used_;     // on the host, by the device
  int uses_ = 0;
  // Tensors on the host, where it is another memory; null until one is asked
  // for.
  std::unique_ptr<flat_param::GuardedStorage> host_storage_;
  int host_uses_ = 0;
  const std::string error_;
  bool changed_ = false;
  absl::Status lost_;  // what was changed did not reach its place
  const std::shared_ptr<OffloadSpace> space_;
};

// Acquires what some tensors lie in, for as long as it lives. Tensors that are
// undefined, or lie in ordinary memory, need nothing.
class Resident {
 public:
  Resident() = default;
  static absl::StatusOr<Resident> Of(absl::Span<const at::Tensor> tensors,
                                     Use use, Where where = Where::kDevice);
  static absl::StatusOr<Resident> Of(const at::Tensor& tensor, Use use,
                                     Where where = Where::kDevice) {
    return Of(absl::MakeConstSpan(&tensor, 1), use, where);
  }
  Resident(Resident&& other) noexcept = default;
  Resident& operator=(Resident&& other) noexcept;
  ~Resident();

  // One more.
  absl::Status Add(const at::Tensor& tensor, Use use,
                   Where where = Where::kDevice);

 private:
  struct Held {
    std::shared_ptr<RestingMemory> memory;
    Where where;
  };
  std::vector<Held> held_;
};

// RestingMemory::OnHost(), or `tensor` itself where it lies in none.
at::Tensor OnHost(const at::Tensor& tensor);

// Whether `tensor` may lack its values because they are in a store.
bool RestsElsewhere(const at::Tensor& tensor);
// A hint that `tensor` is used soon.
void PrefetchTensor(const at::Tensor& tensor);

}  // namespace fsdp

#endif  // FSDP_MEMORY_RESTING_MEMORY_H_
