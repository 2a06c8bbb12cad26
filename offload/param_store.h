// Where bytes of shards rest while no layer computes with them.
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

// A read, a write or a flush that has been started and may still be running.

namespace fsdp::offload {

// Used by one thread at a time; may outlive its store.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  // Blocks until the operation is over: the memory is the caller's again.
  virtual ~Transfer() = default;

  // Blocks until the operation is over; the caller may then use its memory.
  // Errors, each with region, file and offset where there are any:
  //   DeadlineExceeded   still running at `deadline`, memory still in use; a
  //                      later call waits on
  //   DataLoss           the bytes are not those that were last written
  //   ResourceExhausted  no space
  //   Unavailable        the device or the file system failed
  // After an error, what was to be read is of no use, and what was to be
  // written is damaged: reads of it are DataLoss until all of it is written
  // again. Any other result is final, and given again.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

// One that was over before it was given to the caller.
class FinishedTransfer : public Transfer {
 public:
  explicit FinishedTransfer(absl::Status result = absl::OkStatus())
      : result_(std::move(result)) {}

  absl::Status Wait(absl::Time /*deadline*/) override { return result_; }

 private:
  const absl::Status result_;
};

// What stores move fastest: from and to memory that starts at a multiple of
// this, whole regions or multiples of a store's blocks, in regions whose sizes
// are multiples of it too. All else costs a copy, and less than a block to
// write, a read.
inline constexpr int64_t kPageBytes = 4096;

// What a region of `bytes` takes of a store's capacity.
constexpr int64_t StoredBytes(int64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

struct TransferStats {
  int64_t operations = 0;  // that ended well
  int64_t bytes = 0;       // of callers, without padding
  // With at least one such operation under way: bytes / busy_seconds is the
  // speed of the store.
  double busy_seconds = 0;
};

struct StoreStats {
  TransferStats reads;
  TransferStats writes;
  int64_t capacity_bytes = 0;
  int64_t used_bytes = 0;  // by regions, StoredBytes() of each
  int64_t peak_used_bytes = 0;
};

// Regions of fixed size that are read and written in ranges, many at a time.
// A region has a name, which errors repeat ("blocks.3, exp_avg"), and reads as
// zeros until it is written.
//
// Order. Transfers of overlapping bytes take effect in the order in which they
// were started, whatever they wait for: a read finds what the writes started
// before it have written. Others run at the same time.
//
// Threads. All calls are thread-safe. Only Wait() and the destructors of
// Transfer and store block; those of the store for every transfer under way.
class ParamStore {
 public:
  ParamStore() = default;
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;
  virtual ~ParamStore() = default;

  // InvalidArgument for a size < 0 or a name that is empty or longer than
  // kMaxNameBytes; AlreadyExists; ResourceExhausted, with what is needed and
  // what there is, when no free piece of the capacity is large enough.
  virtual absl::Status Create(absl::string_view region, int64_t bytes) = 0;

  // Its space is free for new regions, in a store that can be reopened once a
  // Flush() started later has ended well. NotFound; FailedPrecondition while
  // transfers of it are under way.
  virtual absl::Status Erase(absl::string_view region) = 0;

  // The size that the region was created with; NotFound.
  virtual absl::StatusOr<int64_t> Size(absl::string_view region) const = 0;

  // Starts to read the bytes from `offset` on into `out`, which belongs to the
  // transfer until that is over. NotFound; OutOfRange.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Read(
      absl::string_view region, int64_t offset, absl::Span<char> out) = 0;

  // Starts to write `in`, which may not change until the transfer is over.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Write(
      absl::string_view region, int64_t offset, absl::Span<const char> in) = 0;

  // Starts to make all writes started before as durable as this store can. It
  // is over after all of them; transfers started later take effect later. When
  // one of them has failed, and was not made good since, it fails as well.
  virtual absl::StatusOr<std::unique_ptr<Transfer>> Flush() = 0;

  // Undoes all writes, also those that have failed, since the last Flush() that
  // ended well, or since the store was made or reopened. Regions created since
  // then stay, and read as zeros; those erased stay erased. FailedPrecondition
  // while a transfer is under way; Unimplemented in a store that cannot.
  virtual absl::Status Rollback() = 0;

  virtual StoreStats Stats() const = 0;

  // For logs: "host memory, 1 GiB", "/scratch, 8 GiB, io_uring, ...".
  virtual std::string Describe() const = 0;
};

inline constexpr int64_t kMaxNameBytes = 255;

// What stores say: about the arguments of Create(), of Read() and Write()
// (`what`) for a region of `size` bytes, and about regions.
absl::Status CheckNewRegion(absl::string_view region, int64_t bytes);
absl::Status CheckRange(absl::string_view what, absl::string_view region,
                        int64_t size, int64_t offset, int64_t length);
absl::Status RegionExists(absl::string_view region);
absl::Status NoSpaceFor(absl::string_view region, int64_t bytes, int64_t free,
                        int64_t largest_free);
absl::Status CannotRollBack(absl::string_view store);
absl::Status NoSuchRegion(absl::string_view what, absl::string_view region);

}  // namespace fsdp::offload

#endif  // OFFLOAD_PARAM_STORE_H_
