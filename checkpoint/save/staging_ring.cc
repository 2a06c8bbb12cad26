#include "checkpoint/save/staging_ring.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::checkpoint {

absl::StatusOr<offload::PageMemory> StagingRing::Allocate(int64_t bytes) {
  return offload::PageMemory::Allocate(offload::PageAllocator::System(), bytes);
}

StagingRing::StagingRing(offload::PageMemory memory)
    : memory_(std::move(memory)) {}

bool StagingRing::HasRoom(Wanted* wanted) {
  const StagingRing& ring = *wanted->ring;
  ring.mutex_.AssertReaderHeld();
  return !ring.closed_.ok() || ring.ends_.empty() ||
         wanted->end - ring.given_back_ <= ring.capacity();
}

absl::StatusOr<absl::Span<char>> StagingRing::Take(int64_t bytes,
                                                   absl::Time deadline) {
  FSDP_CHECK(bytes >= 0 && bytes <= capacity());
  absl::MutexLock lock(&mutex_);
  int64_t begin = taken_;
  const int64_t place = begin % capacity();
  if (place + bytes > capacity()) begin += capacity() - place;
  Wanted wanted{this, begin + bytes};
  if (!mutex_.AwaitWithDeadline(absl::Condition(&HasRoom, &wanted), deadline)) {
    return absl::DeadlineExceededError(
        absl::StrCat("waiting for the disk to take what was copied before: ",
                     taken_ - given_back_, " bytes are still to be written"));
  }
  if (!closed_.ok()) return closed_;
  // Nothing is left to come behind.
  if (ends_.empty()) begin = given_back_ = 0;
  taken_ = begin + bytes;
  ends_.push_back(taken_);
  return absl::MakeSpan(memory_.data() + begin % capacity(), bytes);
}

void StagingRing::GiveBack() {
  absl::MutexLock lock(&mutex_);
  FSDP_CHECK(!ends_.empty());
  given_back_ = ends_.front();
  ends_.pop_front();
}

void StagingRing::Close(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (closed_.ok()) closed_ = reason;
}

void StagingRing::Open() {
  absl::MutexLock lock(&mutex_);
  FSDP_CHECK(ends_.empty());
  closed_ = absl::OkStatus();
}

}  // namespace fsdp::checkpoint
