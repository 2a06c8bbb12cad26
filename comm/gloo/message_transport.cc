#include "comm/gloo/message_transport.h"

#include <ATen/ops/from_blob.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/torch_status.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The end of a long message travels as a message of its own. Gloo does not fail
// the receive that is half done when a connection breaks, only those queued
// behind it; so there has to be one, and Wait() looks at it first.
constexpr int64_t kTailBytes = 1024;
constexpr int64_t kLongBytes = int64_t{64} * 1024;

// Deadlines are the business of whoever calls Abort(): a time-out inside Gloo
// would break the connections without saying why.
constexpr auto kNoLimit = std::chrono::hours(24 * 365 * 10);

class C10dMessage final : public Message {
 public:
  // `works` are in the order of posting; `names` outlives the message.
  C10dMessage(const RankNames& names, int peer, std::vector<WorkPtr> works)
      : names_(names), peer_(peer), works_(std::move(works)) {}

  absl::Status Wait() override {
    bool done = true;
    const absl::Status status = TorchToStatus(
        [&] {
          return absl::StrCat("lost the connection to ", names_.Name(peer_));
        },
        [&] {
          for (auto work = works_.rbegin(); work != works_.rend(); ++work) {
            done = (*work)->wait(kNoLimit) && done;
          }
        });
    if (!status.ok()) return ConnectionError(status);
    return done ? absl::OkStatus() : absl::CancelledError("aborted");
  }

  void Abort() override {
    for (const WorkPtr& work : works_) work->abort();
  }

 private:
  const RankNames& names_;
  const int peer_;
  const std::vector<WorkPtr> works_;
};

class Transport final : public MessageTransport {
 public:
  Transport(c10::intrusive_ptr<c10d::Backend> backend, RankNames names,
            std::function<void()> close)
      : backend_(std::move(backend)),
        names_(std::move(names)),
        close_(std::move(close)) {}

  PostedMessage Send(int peer, int tag, const void* data,
                     int64_t bytes) override {
    // c10d has no read-only tensors; a send does not write.
    char* never_written = static_cast<char*>(const_cast<void*>(data));
    return Post(peer, never_written, bytes,
                [&](std::vector<at::Tensor>& tensors) {
                  return backend_->send(tensors, peer, tag);
                });
  }

  PostedMessage Receive(int peer, int tag, void* data, int64_t bytes) override {
    return Post(peer, static_cast<char*>(data), bytes,
                [&](std::vector<at::Tensor>& tensors) {
                  return backend_->recv(tensors, peer, tag);
                });
  }

  void Close() override {
    // An error means that the connections are closed already.
    (void)TorchToStatus("close the connections", close_);
  }

 private:
  using Start = absl::FunctionRef<WorkPtr(std::vector<at::Tensor>&)>;

  PostedMessage Post(int peer, char* data, int64_t bytes, Start start) {
    const int64_t tail = bytes >= kLongBytes ? kTailBytes : 0;
    std::vector<WorkPtr> works;
    const auto post = [&](char* begin, int64_t size) {
      std::vector<at::Tensor> tensors = {
          at::from_blob(begin, {size}, at::TensorOptions().dtype(at::kByte))};
      works.push_back(start(tensors));
    };
    const absl::Status status = TorchToStatus(
        [&] { return absl::StrCat("no connection to ", names_.Name(peer)); },
        [&] {
          post(data, bytes - tail);
          if (tail > 0) post(data + (bytes - tail), tail);
        });
    if (!status.ok()) return ConnectionError(status);
    return std::make_shared<C10dMessage>(names_, peer, std::move(works));
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const RankNames names_;
  const std::function<void()> close_;
};

}  // namespace

std::unique_ptr<MessageTransport> C10dTransport(
    c10::intrusive_ptr<c10d::Backend> backend, RankNames names,
    std::function<void()> close) {
  return std::make_unique<Transport>(std::move(backend), std::move(names),
                                     std::move(close));
}

}  // namespace fsdp::comm
