#include "checkpoint/save/saver.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/start_thread.h"
#include "base/status_error.h"
#include "base/torch_status.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/plan_writer.h"
#include "checkpoint/save/save_job.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/save/staged_feed.h"
#include "checkpoint/save/staging_ring.h"
#include "offload/page_memory.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "writing a checkpoint";

// As large as it has to be, or `ring` if that will do; null where there is no
// memory.
std::unique_ptr<StagingRing> RingOf(int64_t bytes,
                                    std::unique_ptr<StagingRing> ring) {
  if (ring != nullptr && ring->capacity() >= bytes) return ring;
  ring.reset();
  absl::StatusOr<offload::PageMemory> memory = StagingRing::Allocate(bytes);
  if (!memory.ok()) return nullptr;
  return std::make_unique<StagingRing>(*std::move(memory));
}

}  // namespace

Saver::~Saver() {
  if (writer_.joinable()) writer_.join();
}

void Saver::Save(const SaveContext& context, SaveJob job) {
  context_ = context;
  job_.emplace(std::move(job));
  WriteLive();
}

void Saver::SaveCopies(const SaveContext& context, SaveJob job,
                       int64_t staging_bytes) {
  context_ = context;
  job_.emplace(std::move(job));
  const int64_t bytes = std::max<int64_t>(1, job_->plan.BytesOfRanges());
  if (staging_bytes > 0) {
    ring_ = RingOf(std::min(bytes, staging_bytes), std::move(ring_));
  }
  if (staging_bytes <= 0 || ring_ == nullptr) {
    // Without memory for copies there is nothing to do beside the training.
    WriteLive();
    return;
  }
  feed_.emplace(*ring_);
  const bool fits = ring_->capacity() >= bytes;
  absl::Status staged;
  if (fits) staged = Stage();
  if (!StartWriter()) return;
  if (!fits) staged = Stage();
  // What goes wrong here is what the other thread tells all ranks.
  if (!staged.ok()) feed_->Abandon(staged);
  // Copies of parameters that are not row-major, for one.
  std::vector<SaveRange>().swap(job_->plan.ranges);
}

std::optional<Saver::Ended> Saver::Wait() {
  if (writer_.joinable()) writer_.join();
  if (!job_.has_value()) return std::nullopt;
  Ended ended{job_->step, std::exchange(result_, absl::OkStatus())};
  feed_.reset();
  job_.reset();
  return ended;
}

void Saver::WriteLive() {
  result_ = TorchToStatus(kWhat, [this] {
    ThrowIfError(RunSave(
        context_, *job_, [this](const absl::StatusOr<RangeWriter*>& writer) {
          return writer.ok() ? checkpoint::WriteLive(job_->plan, **writer)
                             : writer.status();
        }));
  });
}

absl::Status Saver::Stage() {
  if (!job_->mine.ok()) return job_->mine;
  return TorchToStatus("copying values for a checkpoint", [this] {
    ThrowIfError(feed_->Stage(job_->plan, context_.timeout));
  });
}

// False: the save has failed already.
bool Saver::StartWriter() {
  absl::StatusOr<std::thread> thread =
      StartThread("to write a checkpoint", [this] { WriteStaged(); });
  if (thread.ok()) {
    writer_ = *std::move(thread);
    return true;
  }
  feed_.reset();
  ring_.reset();  // may have copies in it
  // The others wait for this rank's report.
  job_->mine = thread.status();
  WriteLive();
  return false;
}

// On a thread of its own.
void Saver::WriteStaged() {
  bool fed = false;
  const auto feed = [&](const absl::StatusOr<RangeWriter*>& writer) {
    fed = true;
    return feed_->WriteTo(writer);
  };
  result_ = TorchToStatus(
      kWhat, [&] { ThrowIfError(RunSave(context_, *job_, feed)); });
  // Whoever stages must not wait.
  if (!fed) feed(result_).IgnoreError();
}

}  // namespace fsdp::checkpoint
