#include "offload/system_calls.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/files/file_system.h"
#include "base/output_file.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp::offload {

absl::Status CheckMoved(const IoRequest& request, absl::string_view what,
                        absl::string_view path) {
  const bool syncs = request.kind == IoRequest::Kind::kSync;
  if (request.result == (syncs ? 0 : request.bytes)) return absl::OkStatus();
  const std::string where =
      syncs ? absl::StrCat(what, ", sync of")
            : absl::StrCat(what, ", at ", request.offset, " of");
  const int error = request.result < 0 ? static_cast<int>(-request.result) : 0;
  // A file that was opened and aligned is not at fault for these.
  if (error == EINVAL || error == ENXIO) {
    return absl::UnavailableError(
        absl::StrCat(where, " ", path, ": ", std::strerror(error),
                     "; the system's log says more about the device"));
  }
  if (error != 0) return FileError(error, where, path);
  if (request.kind == IoRequest::Kind::kRead) {
    return absl::DataLossError(
        absl::StrCat(where, " ", path, ": the file ends after ", request.result,
                     " of ", request.bytes, " bytes; somebody has cut it off"));
  }
  return absl::UnavailableError(absl::StrCat(
      where, " ", path, ": only ", request.result, " of ", request.bytes,
      " bytes were written; the system's log says more about the device"));
}

int SystemCalls::Open(const std::string& path, int flags) {
  const int descriptor = open(path.c_str(), flags | O_CLOEXEC, 0600);
  return descriptor >= 0 ? descriptor : -errno;
}

int SystemCalls::Stat(int descriptor, struct stat* found) {
  return fstat(descriptor, found) == 0 ? 0 : errno;
}

int64_t SystemCalls::FreeBytes(int descriptor) {
  struct statvfs stats = {};
  if (fstatvfs(descriptor, &stats) != 0) return 0;
  return static_cast<int64_t>(stats.f_bavail) *
         static_cast<int64_t>(stats.f_frsize);
}

int SystemCalls::Allocate(int descriptor, int64_t bytes) {
  return TEMP_FAILURE_RETRY(fallocate(descriptor, 0, 0, bytes)) == 0 ? 0
                                                                     : errno;
}

int SystemCalls::BypassCache(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  if (fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) return errno;
  // Some file systems take the flag and refuse the reads.
  const absl::StatusOr<PageMemory> page =
      PageMemory::Allocate(PageAllocator::System(), kPageBytes);
  if (page.ok() && pread(descriptor, page->data(), kPageBytes, 0) >= 0) {
    return 0;
  }
  fcntl(descriptor, F_SETFL, flags);
  return EINVAL;
}

SystemCalls& SystemCalls::Real() {
  static SystemCalls* const calls = new SystemCalls;
  return *calls;
}

namespace {

int64_t Perform(int descriptor, const IoRequest& request) {
  using Kind = IoRequest::Kind;
  const ssize_t result = TEMP_FAILURE_RETRY(
      request.kind == Kind::kRead
          ? pread(descriptor, request.data, request.bytes, request.offset)
      : request.kind == Kind::kWrite
          ? pwrite(descriptor, request.data, request.bytes, request.offset)
          : fdatasync(descriptor));
  return result >= 0 ? result : -errno;
}

class ThreadQueue : public IoQueue {
 public:
  explicit ThreadQueue(int descriptor) : descriptor_(descriptor) {}

  // Must be called first. Returns an error if there are no threads at all.
  absl::Status StartThreads(int depth) {
    const FileSizeErrors errors;  // which they inherit
    return threads_.Start("to read and write a file", depth);
  }

  void Start(IoRequest* request) override {
    threads_.Run([this, request] {
      request->result = Perform(descriptor_, *request);
      absl::MutexLock lock(&mutex_);
      over_.push_back(request);
    });
  }

  void Wait(std::vector<IoRequest*>& over) override {
    over.clear();
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &ThreadQueue::HasNews));
    std::swap(over, over_);
    woken_ = false;
  }

  void Wake() override {
    absl::MutexLock lock(&mutex_);
    woken_ = true;
  }

  int depth() const override { return threads_.size(); }
  std::string Describe() const override {
    return absl::StrCat(threads_.size(), " threads");
  }

 private:
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return woken_ || !over_.empty();
  }
  const int descriptor_;
  absl::Mutex mutex_;
  std::vector<IoRequest*> over_ ABSL_GUARDED_BY(mutex_);
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  IoThreads threads_;  // the last member: ends first
};

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
    // The additional entry is for the event that Wake() raises.
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

  // Returns whether it is Wake()'s.
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

absl::StatusOr<std::unique_ptr<IoQueue>> SystemCalls::MakeQueue(QueueKind kind,
                                                                int descriptor,
                                                                int depth) {
  if (kind == QueueKind::kIoUring) {
    auto queue = absl::make_unique<UringQueue>(descriptor, depth);
    FSDP_RETURN_IF_ERROR(queue->Init());
    return queue;
  }
  auto queue = absl::make_unique<ThreadQueue>(descriptor);
  FSDP_RETURN_IF_ERROR(queue->StartThreads(depth));
  return queue;
}

}  // namespace fsdp::offload
