#include "offload/testing/offloader_calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::offload::testing {

std::unique_ptr<Offloader> Over(std::unique_ptr<ParamStore> store,
                                int64_t memory_bytes, absl::Duration timeout) {
  OffloaderOptions options;
  options.memory_bytes = memory_bytes;
  options.timeout = timeout;
  std::unique_ptr<Offloader> offloader = Offloader::Make(options).value();
  if (store != nullptr) offloader->AddStore(std::move(store));
  return offloader;
}

std::unique_ptr<Offloader> WithEntries(std::unique_ptr<Offloader> offloader,
                                       int count, int64_t bytes) {
  for (int i = 0; i < count; ++i) {
    FSDP_CHECK(offloader->Add(0, absl::StrCat("entry ", i), bytes).value() ==
               i);
  }
  return offloader;
}

absl::Status Put(Offloader& offloader, int entry, absl::string_view bytes) {
  FSDP_ASSIGN_OR_RETURN(absl::Span<char> memory,
                        offloader.Acquire(entry, Offloader::Use::kOverwrite));
  FSDP_CHECK(memory.size() == bytes.size());
  std::copy(bytes.begin(), bytes.end(), memory.begin());
  offloader.Release(entry);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Get(Offloader& offloader, int entry) {
  FSDP_ASSIGN_OR_RETURN(absl::Span<char> memory,
                        offloader.Acquire(entry, Offloader::Use::kRead));
  std::string bytes(memory.begin(), memory.end());
  offloader.Release(entry);
  return bytes;
}

}  // namespace fsdp::offload::testing
