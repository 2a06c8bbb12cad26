#include "offload/system_calls.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/thread_queue.h"
#include "offload/uring_queue.h"

namespace fsdp::offload {

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
  while (fallocate(descriptor, 0, 0, bytes) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int SystemCalls::BypassCache(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  if (fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) return errno;
  // Some take the flag and refuse the reads.
  const absl::StatusOr<PageMemory> page =
      PageMemory::Allocate(PageAllocator::System(), kPageBytes);
  if (page.ok() && pread(descriptor, page->data(), kPageBytes, 0) >= 0) {
    return 0;
  }
  fcntl(descriptor, F_SETFL, flags);
  return EINVAL;
}

absl::StatusOr<std::unique_ptr<IoQueue>> SystemCalls::MakeQueue(QueueKind kind,
                                                                int descriptor,
                                                                int depth) {
  if (kind == QueueKind::kIoUring) return MakeUringQueue(descriptor, depth);
  return MakeThreadQueue(descriptor, depth);
}

SystemCalls& SystemCalls::Real() {
  static SystemCalls* const calls = new SystemCalls;
  return *calls;
}

}  // namespace fsdp::offload
