#include "checkpoint/save/staged_feed.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/save_plan.h"
#include "ranges/file_place.h"

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

namespace {

// What is copied before the other thread may write it.
constexpr int64_t kPartBytes = int64_t{8} << 20;

}  // namespace

absl::Status StagedFeed::Stage(const SavePlan& plan, absl::Duration timeout) {
  absl::Status staged =
      ForEachRange(plan, [&](const FilePlace& place, ReadBytes read) {
        return StageRange(place, read, timeout);
      });
  End(staged);
  return staged;
}

absl::Status StagedFeed::StageRange(const FilePlace& place, ReadBytes read,
                                    absl::Duration timeout) {
  // Two parts fit: one is written while the other is copied.
  const int64_t step =
      std::max<int64_t>(1, std::min(kPartBytes, ring_.capacity() / 2));
  for (int64_t position = 0; position < place.bytes; position += step) {
    const int64_t bytes = std::min(step, place.bytes - position);
    FSDP_ASSIGN_OR_RETURN(const absl::Span<char> memory,
                          ring_.Take(bytes, absl::Now() + timeout));
    const absl::Status status = read(position, memory);
    // Also what could not be read has to be given back.
    Push({place.file, place.offset + position, memory});
    FSDP_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

void StagedFeed::Abandon(const absl::Status& reason) { End(reason); }

void StagedFeed::Push(const Part& part) {
  const absl::MutexLock lock(&mutex_);
  parts_.push_back(part);
}

void StagedFeed::End(const absl::Status& status) {
  const absl::MutexLock lock(&mutex_);
  ended_ = true;
  end_ = status;
}

absl::Status StagedFeed::WriteTo(const absl::StatusOr<RangeWriter*>& writer) {
  absl::Status status = writer.status();
  // Whoever stages need not wait for what nobody writes.
  if (!status.ok()) ring_.Close(status);
  while (true) {
    mutex_.LockWhen(absl::Condition(
        +[](StagedFeed* feed) {
          feed->mutex_.AssertHeld();
          return feed->HasNews();
        },
        this));
    if (parts_.empty()) {
      status.Update(end_);
      mutex_.Unlock();
      break;
    }
    const Part part = parts_.front();
    parts_.pop_front();
    mutex_.Unlock();
    if (status.ok()) {
      status = (*writer)->WriteBytes(part.file, part.offset,
                                     {part.bytes.data(), part.bytes.size()});
      if (!status.ok()) ring_.Close(status);
    }
    ring_.GiveBack();
  }
  ring_.Open();
  return status;
}

}  // namespace fsdp::checkpoint
