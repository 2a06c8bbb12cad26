// Storage without memory, which answers every access with an error.
#ifndef FLAT_PARAM_ARMED_STORAGE_H_
#define FLAT_PARAM_ARMED_STORAGE_H_

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

namespace fsdp::flat_param {

// Returns a storage of `bytes` without memory. An access raises a c10::Error
// with the text `error`: say whose it is and what to do.
c10::Storage MakeArmedStorage(int64_t bytes, c10::Device device,
                              const std::string& error);

// Arms or disarms `storage`; the text stays. LibTorch can arm a storage ("throw
// on any data access") but has no public way to disarm it, so this sets two
// private flags, which CheckGuardedStorage() verifies at start-up.
void SetArmed(c10::StorageImpl& storage, bool armed);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_ARMED_STORAGE_H_
