// Storage whose memory comes and goes while tensors look into it, and which
// answers every access in between with an error instead of a crash.
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

// The content of a GuardedStorage. Each kind has its own tags.
enum class Guarded {
  kUnsharded,  // whole parameters, while their unit computes
  kResting,    // what rests between uses: shards, gradients, optimizer states
};

// Owns a c10::Storage of fixed size, but not the memory behind it. Filling and
// emptying change neither the version nor the identity of the tensors that look
// into it, so what autograd has saved stays valid, whatever the next address
// is. Not thread-safe.
class GuardedStorage {
 public:
  // Empty at first. An access while empty raises a c10::Error with the text
  // `error`: say whose it is and what to do.
  GuardedStorage(int64_t bytes, c10::Device device, const std::string& error,
                 Guarded kind = Guarded::kUnsharded);
  GuardedStorage(const GuardedStorage&) = delete;
  GuardedStorage& operator=(const GuardedStorage&) = delete;
  // Tensors may outlive this object; accesses then raise `error`.
  ~GuardedStorage();

  // `data` has at least bytes(), stays valid until Empty(), and is not owned.
  void Fill(void* data);
  void Empty();
  bool filled() const { return filled_; }

  // Sets what TagOf() returns, null at first. It is not owned.
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

// Returns the tag of the GuardedStorage of that kind that `storage` belongs to;
// null if there is none. Costs a nanosecond.
const void* TagOf(const c10::Storage& storage,
                  Guarded kind = Guarded::kUnsharded);

// Returns whether `storage` belongs to a GuardedStorage of that kind, alive or
// not.
bool IsGuarded(const c10::Storage& storage, Guarded kind = Guarded::kUnsharded);

// Internal: this LibTorch does not behave as GuardedStorage needs.
absl::Status CheckGuardedStorage();

// Internal: returns a storage of `bytes` without memory. An access raises a
// c10::Error with the text `error`: say whose it is and what to do.
c10::Storage MakeArmedStorage(int64_t bytes, c10::Device device,
                              const std::string& error);

// Internal: arms or disarms `storage`; the text stays. LibTorch can arm a
// storage ("throw on any data access") but has no public way to disarm it, so
// this sets two private flags, which CheckGuardedStorage() verifies at
// start-up.
void SetArmed(c10::StorageImpl& storage, bool armed);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_GUARDED_STORAGE_H_
