// Calls of offloaders, for tests.
#ifndef OFFLOAD_TESTING_OFFLOADER_CALLS_H_
#define OFFLOAD_TESTING_OFFLOADER_CALLS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "offload/offloader.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// Makes an offloader with `store`, if there is one, as store 0.
std::unique_ptr<Offloader> Over(std::unique_ptr<ParamStore> store,
                                int64_t memory_bytes,
                                absl::Duration timeout = absl::Minutes(1));

// Adds `count` entries of `bytes` each to store 0.
std::unique_ptr<Offloader> WithEntries(std::unique_ptr<Offloader> offloader,
                                       int count, int64_t bytes);

absl::Status Put(Offloader& offloader, int entry, absl::string_view bytes);
absl::StatusOr<std::string> Get(Offloader& offloader, int entry);

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_OFFLOADER_CALLS_H_
