// Storage whose memory comes and goes while tensors keep looking into it, and
// which answers every access in between with an error instead of a crash.
#ifndef FLAT_PARAM_GUARDED_STORAGE_H_
#define FLAT_PARAM_GUARDED_STORAGE_H_

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace fsdp::flat_param {

// What lies in a GuardedStorage: each kind has tags of its own.
enum class Guarded {
  kUnsharded,  // whole parameters, while their unit computes
  kResting,    // what rests between uses: shards, gradients, optimizer states
};

// Owns a c10::Storage of fixed size but not the memory behind it. Filling and
// emptying change neither the version of the tensors that look into it nor
// their identity, so what autograd has saved stays valid, at whatever address
// the next fill puts it. Not thread-safe.
class GuardedStorage {
 public:
  // Empty at first. `error` is the text of the c10::Error that an access to the
  // empty storage raises: say whose it is and what to do.
  GuardedStorage(int64_t bytes, c10::Device device, const std::string& error,
                 Guarded kind = Guarded::kUnsharded);
  GuardedStorage(const GuardedStorage&) = delete;
  GuardedStorage& operator=(const GuardedStorage&) = delete;
  // Tensors may outlive this object: they raise `error` from then on.
  ~GuardedStorage();

  // `data`: at least bytes() that stay valid until Empty(); not owned.
  void Fill(void* data);
  void Empty();
  bool filled() const { return filled_; }

  // What TagOf() finds from now on; null at first. Not owned.
  void SetTag(const void* tag);

  int64_t bytes() const { return bytes_; }
  const c10::Storage& storage() const { return storage_; }

 private:
  c10::DataPtr Pointer(void* data) const;

  c10::Storage storage_;
  int64_t bytes_;
  Guarded kind_;
  const void* tag_ = nullptr;
  bool filled_ = false;
};

// The tag of the GuardedStorage of that kind that `storage` belongs to; null
// where there is none. Costs a nanosecond.
const void* TagOf(const c10::Storage& storage,
                  Guarded kind = Guarded::kUnsharded);

// Whether `storage` belongs to a GuardedStorage of that kind, alive or not.
bool IsGuarded(const c10::Storage& storage, Guarded kind = Guarded::kUnsharded);

// Internal when this LibTorch does not behave as GuardedStorage needs.
absl::Status CheckGuardedStorage();

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_GUARDED_STORAGE_H_
