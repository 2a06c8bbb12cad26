#include "checkpoint/save/saver.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::checkpoint {

absl::Status StagingRing::Stage(const SavePlan& plan, absl::Duration timeout,
                                absl::string_view what) {
  absl::Status staged = ForEachRange(
      plan, [&](const FilePlace& place, ReadBytes read) -> absl::Status {
        for (int64_t position = 0; position < place.bytes;) {
          FSDP_ASSIGN_OR_RETURN(
              const absl::Span<char> memory,
              AwaitRoom(place.bytes - position, absl::Now() + timeout, what));
          FSDP_RETURN_IF_ERROR(read(position, memory));
          const auto bytes = static_cast<int64_t>(memory.size());
          const absl::MutexLock lock(&mutex_);
          parts_.push_back(
              {{place.file, place.offset + position, bytes}, memory.data()});
          staged_ += bytes;
          position += bytes;
        }
        return absl::OkStatus();
      });
  Abandon(staged);
  return staged;
}

absl::StatusOr<absl::Span<char>> StagingRing::AwaitRoom(
    int64_t bytes, absl::Time deadline, absl::string_view what) {
  constexpr int64_t kMost = int64_t{8} << 20;  // of a part
  const absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithDeadline(absl::Condition(this, &StagingRing::HasRoom),
                                deadline)) {
    return absl::DeadlineExceededError(
        absl::StrCat(what, ": waiting for the disk: not done at the deadline: ",
                     staged_ - written_,
                     " bytes are still to be written; see what that disk does, "
                     "or raise CheckpointerOptions::timeout"));
  }
  if (!closed_.ok()) return closed_;
  const int64_t begin = staged_ % capacity();
  return absl::MakeSpan(memory_.data() + begin,
                        std::min({bytes, kMost, capacity() - begin,
                                  written_ + capacity() - staged_}));
}

void StagingRing::Abandon(const absl::Status& status) {
  const absl::MutexLock lock(&mutex_);
  end_ = status;
}

absl::Status StagingRing::WriteTo(RangeWriter& writer) {
  const absl::MutexLock lock(&mutex_);
  while (closed_.ok()) {
    mutex_.Await(absl::Condition(this, &StagingRing::HasNews));
    if (parts_.empty()) return *end_;
    const auto [place, bytes] = parts_.front();
    mutex_.Unlock();
    const absl::Status status = writer.WriteBytes(
        place.file, place.offset, absl::string_view(bytes, place.bytes));
    mutex_.Lock();
    parts_.pop_front();
    written_ += place.bytes;
    closed_.Update(status);
  }
  return closed_;
}

void StagingRing::Close(const absl::Status& reason) {
  const absl::MutexLock lock(&mutex_);
  closed_.Update(reason);
}

namespace {

constexpr char kWhat[] = "writing a checkpoint";
// A save that was given up ends within this time where the disk does answer.
constexpr absl::Duration kSoon = absl::Seconds(5);

// As large as it has to be, of `memory` if that will do; null where there is no
// memory.
std::unique_ptr<StagingRing> RingOf(int64_t bytes, offload::PageMemory memory) {
  if (memory.bytes() < bytes) {
    memory = offload::PageMemory();
    auto more =
        offload::PageMemory::Allocate(offload::PageAllocator::System(), bytes);
    if (!more.ok()) return nullptr;
    memory = *std::move(more);
  }
  return std::make_unique<StagingRing>(std::move(memory));
}

}  // namespace

class Saver::Writing {
 public:
  Writing(const SaveContext& context, SaveJob job)
      : context_(context), job_(std::move(job)) {}
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  ~Writing() {
    if (writer_.joinable()) writer_.join();
  }

  int64_t step() const { return job_.step; }
  int64_t bytes() const { return job_.plan.BytesOfRanges(); }

  void WriteLive() {
    End(TorchToStatus(kWhat, [this] {
      return RunSave(
          context_, job_, [this](const absl::StatusOr<RangeWriter*>& writer) {
            return writer.ok() ? checkpoint::WriteLive(job_.plan, **writer)
                               : writer.status();
          });
    }));
  }

  // By way of `ring`.
  void WriteCopies(std::unique_ptr<StagingRing> ring) {
    ring_ = std::move(ring);
    const bool fits = ring_->capacity() >= bytes();
    absl::Status staged;
    if (fits) staged = Stage();
    if (!StartWriter()) return;
    if (!fits) staged = Stage();
    // What goes wrong here is what the other thread tells all ranks.
    if (!staged.ok()) ring_->Abandon(staged);
    // Copies of parameters that are not row-major, for one.
    std::vector<SaveRange>().swap(job_.plan.ranges);
  }

  // Until it has ended, or is given up.
  absl::Status Wait() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](std::optional<absl::Status>* result) {
          return result->has_value();
        },
        &result_));
    return *result_;
  }
  // Nothing of it is under way any more, or will be soon.
  bool IsOver(absl::Duration soon = absl::ZeroDuration()) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&is_over_), soon);
  }
  // After it is over. None if it had no ring.
  offload::PageMemory TakeMemory() {
    if (writer_.joinable()) writer_.join();
    return ring_ == nullptr ? offload::PageMemory() : ring_->TakeMemory();
  }

 private:
  // The first result counts.
  void SetResult(const absl::Status& status, bool is_over) {
    absl::MutexLock lock(&mutex_);
    if (!result_.has_value()) result_ = status;
    is_over_ = is_over;
  }
  void End(const absl::Status& status) { SetResult(status, /*is_over=*/true); }

  absl::Status Stage() {
    if (!job_.mine.ok()) return job_.mine;
    const std::string what = absl::StrCat("save step ", job_.step);
    return TorchToStatus("copying values for a checkpoint", [&] {
      return ring_->Stage(job_.plan, context_.together.timeout, what);
    });
  }

  // False: the save has failed already.
  bool StartWriter() {
    absl::StatusOr<std::thread> thread =
        StartThread("to write a checkpoint", [this] { WriteStaged(); });
    if (thread.ok()) {
      writer_ = *std::move(thread);
      return true;
    }
    ring_.reset();  // may have copies in it
    // The others wait for this rank's report.
    job_.mine = thread.status();
    WriteLive();
    return false;
  }

  // On a thread of its own.
  void WriteStaged() {
    const auto feed = [this](const absl::StatusOr<RangeWriter*>& writer) {
      if (writer.ok()) return ring_->WriteTo(**writer);
      ring_->Close(writer.status());
      return writer.status();
    };
    const absl::Status status = TorchToStatus(kWhat, [&] {
      return RunSave(context_, job_, feed, [this](const absl::Status& why) {
        SetResult(why, /*is_over=*/false);
        // Nor does whoever stages wait for room.
        ring_->Close(why);
      });
    });
    // Whoever stages must not wait any more.
    ring_->Close(status);
    End(status);
  }

  const SaveContext context_;
  SaveJob job_;
  std::unique_ptr<StagingRing> ring_;

  absl::Mutex mutex_;
  std::optional<absl::Status> result_ ABSL_GUARDED_BY(mutex_);
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread writer_;  // the last member: ends first
};

Saver::Saver() = default;
Saver::~Saver() = default;

void Saver::Begin(const SaveContext& context, SaveJob job) {
  if (stuck_ != nullptr && stuck_->IsOver(kSoon)) {
    stuck_.reset();
    for (const int64_t step : std::exchange(left_, {})) {
      if (context.folder == nullptr) continue;
      context.folder->Discard(step).IgnoreError();
    }
  }
  SaveContext mine = context;
  if (stuck_ != nullptr) {
    left_.push_back(job.step);
    job.mine = absl::UnavailableError(absl::StrCat(
        "save step ", job.step, ": the save of step ", stuck_->step(),
        ", which was given up, still waits for the disk; see what that disk "
        "does, and save again"));
    mine.folder = nullptr;  // that save has it
  }
  writing_ = std::make_unique<Writing>(mine, std::move(job));
}

void Saver::Save(const SaveContext& context, SaveJob job,
                 int64_t staging_bytes) {
  Begin(context, std::move(job));
  const int64_t bytes = std::max<int64_t>(1, writing_->bytes());
  std::unique_ptr<StagingRing> ring;
  if (staging_bytes > 0 && stuck_ == nullptr) {
    ring = RingOf(std::min(bytes, staging_bytes), std::move(memory_));
  }
  if (ring != nullptr) {
    writing_->WriteCopies(std::move(ring));
  } else {
    // Without memory for copies there is nothing to do beside the training.
    writing_->WriteLive();
  }
}

std::optional<Saver::Ended> Saver::Wait() {
  if (writing_ == nullptr) return std::nullopt;
  Ended ended{writing_->step(), writing_->Wait()};
  if (writing_->IsOver()) {
    offload::PageMemory memory = writing_->TakeMemory();
    if (memory.bytes() > 0) memory_ = std::move(memory);
    writing_.reset();
  } else {
    stuck_ = std::move(writing_);
  }
  return ended;
}

}  // namespace fsdp::checkpoint
