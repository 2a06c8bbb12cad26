// A store of bytes, for shards that rest while no layer computes with them.
#ifndef OFFLOAD_PARAM_STORE_H_
#define OFFLOAD_PARAM_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace fsdp::offload {

// A read, a write or a flush that was started and may still be running. Used by
// one thread at a time; it may outlive its store.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  // Blocks until the operation is over; the memory is the caller's again.
  virtual ~Transfer() = default;

  // Blocks until the operation is over; the caller may then use its memory.
  // Errors name region, file and offset if there are any:
  //   DeadlineExceeded   still running at `deadline`, memory in use; a
  //                      later call goes on waiting
  //   DataLoss           the bytes are not those that were last written
  //   ResourceExhausted  no space
  //   Unavailable        the device or the file system failed
  // After an error the memory of a read is useless, and the range of a write is
  // damaged: reads of it are DataLoss until all of it is written again. Any
  // result but DeadlineExceeded is final, and later calls return it again.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

// A transfer that was over before the caller got it.
class FinishedTransfer : public Transfer {
 public:
  explicit FinishedTransfer(absl::Status result = absl::OkStatus())
      : result_(std::move(result)) {}

  absl::Status Wait(absl::Time /*deadline*/) override { return result_; }

 private:
  const absl::Status result_;
};

// Transfers are fastest from and to memory that starts at a multiple of this,
// for whole regions or multiples of a store's blocks, in regions of such sizes.
// Others cost a copy, and a write of less than a block costs a read.
inline constexpr int64_t kPageBytes = 4096;

// Returns the bytes of a store's capacity that a region of `bytes` takes.
constexpr int64_t StoredBytes(int64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// The reads or the writes of a store.
struct TransferStats {
  int64_t operations = 0;  // that ended well
  int64_t bytes = 0;       // of callers, without padding
  // Seconds with at least one transfer under way; bytes / busy_seconds is the
  // speed of the store.
  double busy_seconds = 0;
};

// Counts what a store holds and has done since it was made.
struct StoreStats {
  TransferStats reads;          // of all regions
  TransferStats writes;         // likewise
  int64_t capacity_bytes = 0;   // for all regions
  int64_t used_bytes = 0;       // by regions, each counted by StoredBytes()
  int64_t peak_used_bytes = 0;  // the most at once
};

// Counts the work of an Offloader, one memory in front of several stores.
struct OffloaderStats {
  int64_t found = 0;              // in memory when acquired
  int64_t prefetched = 0;         // being read ahead when acquired
  int64_t missed = 0;             // neither
  double waited_seconds = 0;      // for reads and writes
  int64_t peak_memory_bytes = 0;  // the most in use at once
};

// Has regions of fixed sizes, which are read and written in ranges, many at a
// time. A region has a name, which errors repeat ("blocks.3, exp_avg"), and
// reads as zeros until it is written.
//
// Order: transfers of overlapping bytes take effect in the order in which they
// were started, whenever they are waited for. A read finds what the writes
// before it have written. Other transfers run at the same time.
//
// Threads: all calls are thread-safe. Only Wait() and the destructors of
// Transfer and store block; the store's waits for every transfer under way.
class ParamStore {
 public:
  ParamStore() = default;
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;
  virtual ~ParamStore() = default;

  // InvalidArgument: `bytes` < 0, or a name that is empty or longer than
  // kMaxNameBytes; AlreadyExists; ResourceExhausted, with the bytes needed and
  // available: no free piece of the capacity is large enough.
  virtual absl::Status Create(absl::string_view region, int64_t bytes) = 0;

  // Erases the region. Its space is free for new ones; in a store that can be
  // reopened, once a Flush() started later has ended well. NotFound;
  // FailedPrecondition: a transfer of it is under way.
  virtual absl::Status Erase(absl::string_view region) = 0;

  // Returns the size that the region was created with. NotFound.
  virtual absl::StatusOr<int64_t> Size(absl::string_view region) const = 0;

  // Starts to read the bytes from `offset` on into `out`, which belongs to the
  // transfer until it is over. NotFound; OutOfRange.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Read(
      absl::string_view region, int64_t offset, absl::Span<char> out) = 0;

  // Starts to write `in`, which may not change until the transfer is over.
  // NotFound; OutOfRange.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Write(
      absl::string_view region, int64_t offset, absl::Span<const char> in) = 0;

  // Starts to make all earlier writes as durable as this store can. It ends
  // after them, and later transfers take effect later. It fails if one of them
  // has failed and was not repeated since.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Flush() = 0;

  // Undoes all writes, also failed ones, since the last Flush() that ended
  // well, or since the store was made or reopened. Regions created since stay
  // and read as zeros; erased ones stay erased. FailedPrecondition: a transfer
  // is under way; Unimplemented: the store cannot.
  virtual absl::Status Rollback() = 0;

  virtual StoreStats Stats() const = 0;  // up to now

  // For logs: "host memory, 1 GiB", "/scratch, 8 GiB, io_uring, ...".
  virtual std::string Describe() const = 0;
};

// The longest name of a region.
inline constexpr int64_t kMaxNameBytes = 255;

}  // namespace fsdp::offload

#endif  // OFFLOAD_PARAM_STORE_H_
