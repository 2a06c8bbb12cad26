#include "offload/testing/store_calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::offload::testing {

std::string Pattern(int64_t seed, int64_t size) {
  std::string bytes(size, '\0');
  uint64_t state = static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15u + 1;
  for (char& byte : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(state >> 56);
  }
  return bytes;
}

absl::Status Finish(absl::StatusOr<std::unique_ptr<Transfer>> transfer) {
  FSDP_RETURN_IF_ERROR(transfer.status());
  return (*transfer)->Wait(absl::Now() + absl::Seconds(60));
}

absl::Status WriteNow(ParamStore& store, absl::string_view region,
                      int64_t offset, absl::string_view bytes) {
  return Finish(store.Write(region, offset, bytes));
}

absl::StatusOr<std::string> ReadNow(ParamStore& store, absl::string_view region,
                                    int64_t offset, int64_t size) {
  std::string bytes(size, '?');
  FSDP_RETURN_IF_ERROR(
      Finish(store.Read(region, offset, absl::MakeSpan(bytes))));
  return bytes;
}

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
