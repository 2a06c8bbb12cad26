// Storage that has no memory and answers every access with an error.
#ifndef FLAT_PARAM_ARMED_STORAGE_H_
#define FLAT_PARAM_ARMED_STORAGE_H_

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

namespace fsdp::flat_param {

// A storage of `bytes` without memory. An access to it raises a c10::Error with
// the text `error`: say whose it is and what to do.
c10::Storage MakeArmedStorage(int64_t bytes, c10::Device device,
                              const std::string& error);

// LibTorch can arm a storage ("throw on any data access") but offers no public
// way to disarm it, so this sets its two private flags; CheckGuardedStorage()
// verifies at start-up that they are what it thinks. The text stays.
void SetArmed(c10::StorageImpl& storage, bool armed);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_ARMED_STORAGE_H_
