// Calls of stores that wait for their end, and of offloaders, for tests.
#ifndef OFFLOAD_TESTING_STORE_CALLS_H_
#define OFFLOAD_TESTING_STORE_CALLS_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "offload/offloader.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// Returns `size` bytes that all depend on `seed`.
std::string Pattern(int64_t seed, int64_t size);

// Returns the error of the start, or waits for the result, longer than a
// working store needs.
absl::Status Finish(absl::StatusOr<std::unique_ptr<Transfer>> transfer);

absl::Status WriteNow(ParamStore& store, absl::string_view region,
                      int64_t offset, absl::string_view bytes);
absl::StatusOr<std::string> ReadNow(ParamStore& store, absl::string_view region,
                                    int64_t offset, int64_t size);

// Makes an offloader with `store`, if there is one, as store 0.
std::unique_ptr<Offloader> Over(std::unique_ptr<ParamStore> store,
                                int64_t memory_bytes,
                                absl::Duration timeout = absl::Minutes(1));

// Adds `count` entries of `bytes` each to store 0.
std::unique_ptr<Offloader> WithEntries(std::unique_ptr<Offloader> offloader,
                                       int count, int64_t bytes);

// Counts the bytes that are out, and gives no more than `limit` at once.
class CountingAllocator : public PageAllocator {
 public:
  explicit CountingAllocator(
      int64_t limit = std::numeric_limits<int64_t>::max())
      : limit_(limit) {}

  absl::StatusOr<char*> Allocate(int64_t bytes) override {
    if (bytes > limit_) return absl::ResourceExhaustedError("no more");
    ++calls;
    out += bytes;
    return System().Allocate(bytes);
  }
  void Free(char* memory, int64_t bytes) override {
    out -= bytes;
    System().Free(memory, bytes);
  }

  int64_t calls = 0;
  int64_t out = 0;

 private:
  const int64_t limit_;
};

absl::Status Put(Offloader& offloader, int entry, absl::string_view bytes);
absl::StatusOr<std::string> Get(Offloader& offloader, int entry);

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_STORE_CALLS_H_
