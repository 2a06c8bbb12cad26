#include "comm/gloo/peer_messages.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

absl::Status Broken() { return absl::CancelledError("the group is broken"); }

// One that could not be posted.
class FailedMessage final : public Message {
 public:
  explicit FailedMessage(absl::Status status) : status_(std::move(status)) {}

  absl::Status Wait() override { return status_; }
  void Abort() override {}

 private:
  const absl::Status status_;
};

}  // namespace

PeerMessages::PeerMessages(std::unique_ptr<MessageTransport> transport)
    : transport_(std::move(transport)) {}

absl::Status PeerMessages::Send(int peer, int tag, const void* data,
                                int64_t bytes, Batch* batch) {
  if (bytes == 0) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckNotAborted());
  return Add(transport_->Send(peer, tag, data, bytes), batch);
}

absl::Status PeerMessages::Receive(int peer, int tag, void* data, int64_t bytes,
                                   Batch* batch) {
  if (bytes == 0) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckNotAborted());
  absl::StatusOr<std::shared_ptr<Message>> message =
      transport_->Receive(peer, tag, data, bytes);
  if (!message.ok())
    message = std::make_shared<FailedMessage>(message.status());
  return Add(std::move(message), batch);
}

absl::Status PeerMessages::Await(Batch* batch) {
  absl::Status status;
  for (const auto& message : batch->posted_) {
    status = message->Wait();
    if (!status.ok()) break;
  }
  GiveUp(batch);
  absl::MutexLock lock(&mutex_);
  if (!status.ok() && aborted_) return Broken();
  if (!status.ok()) AbortLocked();
  return status;
}

void PeerMessages::Abort() {
  absl::MutexLock lock(&mutex_);
  AbortLocked();
}

absl::Status PeerMessages::CheckNotAborted() {
  absl::MutexLock lock(&mutex_);
  return aborted_ ? Broken() : absl::OkStatus();
}

absl::Status PeerMessages::Add(absl::StatusOr<std::shared_ptr<Message>> message,
                               Batch* batch) {
  absl::MutexLock lock(&mutex_);
  if (!message.ok()) {
    if (aborted_) return Broken();
    AbortLocked();
    return message.status();
  }
  // Abort() may have run in between, and has not seen this one.
  if (aborted_) (*message)->Abort();
  batch->posted_.push_back(*message);
  in_flight_.push_back(*std::move(message));
  return absl::OkStatus();
}

void PeerMessages::GiveUp(Batch* batch) {
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& message : batch->posted_) {
      const auto found =
          std::find(in_flight_.begin(), in_flight_.end(), message);
      if (found != in_flight_.end()) in_flight_.erase(found);
    }
  }
  batch->posted_.clear();
}

void PeerMessages::AbortLocked() {
  if (aborted_) return;
  aborted_ = true;
  // Closing alone does not wake who waits on this side.
  for (const auto& message : in_flight_) message->Abort();
  in_flight_.clear();
  transport_->Close();
}

}  // namespace fsdp::comm
