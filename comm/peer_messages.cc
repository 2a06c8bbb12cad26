#include "comm/peer_messages.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::comm {
namespace {

// The end of a long message travels as a message of its own. Gloo does not fail
// the receive that is half done when a connection breaks, only those queued
// behind it; so there has to be one, and Await() looks at it first.
constexpr int64_t kTailBytes = 1024;
constexpr int64_t kLongBytes = 64 * 1024;

// Deadlines are the business of whoever calls Abort(): a time-out inside Gloo
// would break the connections without saying why.
constexpr auto kNoLimit = std::chrono::hours(24 * 20);

// The first line of c10d's texts; the rest is a C++ stack.
std::string FirstLine(absl::string_view text) {
  const std::vector<absl::string_view> lines =
      absl::StrSplit(text, absl::MaxSplits('\n', 1));
  return std::string(lines[0]);
}

}  // namespace

PeerMessages::PeerMessages(C10dBackend backend)
    : backend_(std::move(backend)) {}

absl::Status PeerMessages::Send(int peer, int tag, const void* data,
                                int64_t bytes, Batch* batch) {
  // c10d has no read-only tensors; a send does not write.
  char* unused_mutable = static_cast<char*>(const_cast<void*>(data));
  return Post(Direction::kSend, peer, tag, unused_mutable, bytes, batch);
}

absl::Status PeerMessages::Receive(int peer, int tag, void* data, int64_t bytes,
                                   Batch* batch) {
  return Post(Direction::kReceive, peer, tag, static_cast<char*>(data), bytes,
              batch);
}

absl::Status PeerMessages::Post(Direction direction, int peer, int tag,
                                char* data, int64_t bytes, Batch* batch) {
  const int64_t tail = bytes >= kLongBytes ? kTailBytes : 0;
  FSDP_RETURN_IF_ERROR(
      PostOne(direction, peer, tag, data, bytes - tail, batch));
  return PostOne(direction, peer, tag, data + (bytes - tail), tail, batch);
}

absl::Status PeerMessages::PostOne(Direction direction, int peer, int tag,
                                   char* data, int64_t bytes, Batch* batch) {
  if (bytes == 0) return absl::OkStatus();
  {
    absl::MutexLock lock(&mutex_);
    if (aborted_) return absl::CancelledError("the group is broken");
  }
  c10::intrusive_ptr<c10d::Work> work;
  const absl::Status status = TorchToStatus(absl::StrCat("rank ", peer), [&] {
    std::vector<at::Tensor> tensors = {
        at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte))};
    work = direction == Direction::kSend
               ? backend_.group->send(tensors, peer, tag)
               : backend_.group->recv(tensors, peer, tag);
  });
  if (!status.ok()) {
    Abort();
    return absl::UnavailableError(
        absl::StrCat("no connection to ", FirstLine(status.message())));
  }
  batch->posted_.push_back({peer, work});
  absl::MutexLock lock(&mutex_);
  in_flight_.push_back(work);
  // Abort() may have run in between, and has not seen this one.
  if (aborted_) work->abort();
  return absl::OkStatus();
}

absl::Status PeerMessages::Await(Batch* batch) {
  absl::Status status;
  while (!batch->posted_.empty() && status.ok()) {
    const Batch::Posted& posted = batch->posted_.back();
    bool done = false;
    status = TorchToStatus(absl::StrCat("rank ", posted.peer),
                           [&] { done = posted.work->wait(kNoLimit); });
    absl::MutexLock lock(&mutex_);
    if (aborted_ && !(status.ok() && done)) {
      status = absl::CancelledError("the group is broken");
    } else if (!status.ok()) {
      status = absl::UnavailableError(
          absl::StrCat("lost the connection to ", FirstLine(status.message())));
    }
    ForgetLocked(posted.work);
    batch->posted_.pop_back();
  }
  if (!status.ok()) {
    Abort();
    GiveUp(batch);
  }
  return status;
}

void PeerMessages::GiveUp(Batch* batch) {
  {
    absl::MutexLock lock(&mutex_);
    for (const Batch::Posted& posted : batch->posted_) {
      ForgetLocked(posted.work);
    }
  }
  batch->posted_.clear();
}

void PeerMessages::ForgetLocked(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto found = std::find(in_flight_.begin(), in_flight_.end(), work);
  if (found != in_flight_.end()) in_flight_.erase(found);
}

void PeerMessages::Abort() {
  absl::MutexLock lock(&mutex_);
  if (aborted_) return;
  aborted_ = true;
  // Closing alone does not wake who waits on this side.
  for (const auto& work : in_flight_) work->abort();
  in_flight_.clear();
  // What cannot be closed any more is closed.
  (void)TorchToStatus("close the connections", [&] {
    if (backend_.close) {
      backend_.close();
    } else {
      backend_.group->abort();
    }
  });
}

}  // namespace fsdp::comm
