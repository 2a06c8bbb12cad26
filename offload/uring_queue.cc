#include "offload/uring_queue.h"

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::offload {
namespace {

absl::Status Refused(int error) {
  return absl::UnavailableError(
      absl::StrCat("io_uring refused: ", std::strerror(error)));
}

class UringQueue : public IoQueue {
 public:
  UringQueue(int descriptor, int depth)
      : descriptor_(descriptor), depth_(depth) {}

  ~UringQueue() override {
    if (has_ring_) io_uring_queue_exit(&ring_);
    if (event_ >= 0) close(event_);
  }

  absl::Status Init() {
    // One more for the event that Wake() raises.
    const int error = -io_uring_queue_init(depth_ + 1, &ring_, 0);
    if (error != 0) return Refused(error);
    has_ring_ = true;
    FSDP_RETURN_IF_ERROR(CheckOperations());
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return Refused(errno);
    WatchEvent();
    return absl::OkStatus();
  }

  void Start(IoRequest* request) override {
    io_uring_sqe* entry = NextEntry();
    switch (request->kind) {
      case IoRequest::Kind::kRead:
        io_uring_prep_read(entry, descriptor_, request->data, request->bytes,
                           request->offset);
        break;
      case IoRequest::Kind::kWrite:
        io_uring_prep_write(entry, descriptor_, request->data, request->bytes,
                            request->offset);
        break;
      case IoRequest::Kind::kSync:
        io_uring_prep_fsync(entry, descriptor_, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data(entry, request);
    Submit();
  }

  void Wait(std::vector<IoRequest*>& over) override {
    over.clear();
    bool woken = false;
    while (over.empty() && !woken) {
      io_uring_cqe* entry = nullptr;
      const int error = -io_uring_wait_cqe(&ring_, &entry);
      if (error == EINTR || error == EAGAIN) continue;
      FSDP_CHECK(error == 0);
      do {
        woken |= TakeCompletion(entry, over);
      } while (io_uring_peek_cqe(&ring_, &entry) == 0);
    }
  }

  void Wake() override {
    const uint64_t one = 1;
    while (write(event_, &one, sizeof(one)) < 0) {
      FSDP_CHECK(errno == EINTR);
    }
  }

  int depth() const override { return depth_; }
  std::string Describe() const override {
    return absl::StrCat("io_uring, ", depth_, " in flight");
  }

 private:
  absl::Status CheckOperations() {
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    if (probe == nullptr) return Refused(ENOSYS);
    const bool complete = io_uring_opcode_supported(probe, IORING_OP_READ) &&
                          io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                          io_uring_opcode_supported(probe, IORING_OP_FSYNC);
    io_uring_free_probe(probe);
    return complete ? absl::OkStatus() : Refused(EOPNOTSUPP);
  }

  io_uring_sqe* NextEntry() {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    FSDP_CHECK(entry != nullptr);  // more than depth() in flight
    return entry;
  }

  void Submit() {
    int result = 0;
    do {
      result = io_uring_submit(&ring_);
    } while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
    FSDP_CHECK(result >= 0);
  }

  void WatchEvent() {
    io_uring_sqe* const entry = NextEntry();
    io_uring_prep_read(entry, event_, &events_, sizeof(events_), 0);
    io_uring_sqe_set_data(entry, nullptr);
    Submit();
  }

  // True if it is Wake()'s.
  bool TakeCompletion(io_uring_cqe* entry, std::vector<IoRequest*>& over) {
    auto* const request = static_cast<IoRequest*>(io_uring_cqe_get_data(entry));
    const int result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    if (request == nullptr) {
      WatchEvent();
      return true;
    }
    if (result == -EINTR || result == -EAGAIN) {
      Start(request);
      return false;
    }
    request->result = result;
    over.push_back(request);
    return false;
  }

  const int descriptor_;
  const int depth_;
  io_uring ring_ = {};
  bool has_ring_ = false;
  int event_ = -1;
  uint64_t events_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(int descriptor,
                                                        int depth) {
  auto queue = absl::make_unique<UringQueue>(descriptor, depth);
  FSDP_RETURN_IF_ERROR(queue->Init());
  return queue;
}

}  // namespace fsdp::offload
