#include "benchmarks/plain_file.h"

#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"

namespace fsdp {

PlainFile::PlainFile(const std::string& directory, int64_t bytes,
                     int64_t block_bytes, int depth)
    : bytes_(bytes), block_bytes_(block_bytes), depth_(depth) {
  std::string name = absl::StrCat(directory, "/plain_file_XXXXXX");
  descriptor_ = mkostemp(name.data(), O_CLOEXEC);
  FSDP_CHECK(descriptor_ >= 0);
  unlink(name.c_str());
  FSDP_CHECK(fallocate(descriptor_, 0, 0, bytes) == 0);
  // If it is refused, this file and the stores use the page cache.
  fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_DIRECT);
  FSDP_CHECK(io_uring_queue_init(depth, &ring_, 0) == 0);
}

PlainFile::~PlainFile() {
  io_uring_queue_exit(&ring_);
  close(descriptor_);
}

double PlainFile::Move(int64_t read_bytes, int64_t write_bytes, char* memory) {
  const absl::Time begin = absl::Now();
  int64_t read = 0;
  int64_t written = 0;
  int in_flight = 0;
  while (read < read_bytes || written < write_bytes) {
    // Reads and writes end together.
    const bool writes = written * read_bytes <= read * write_bytes
                            ? written < write_bytes
                            : read >= read_bytes;
    const int64_t offset = writes ? bytes_ - block_bytes_ - written : read;
    Start(writes, memory + offset, offset);
    (writes ? written : read) += block_bytes_;
    if (++in_flight == depth_) {
      AwaitOne();
      --in_flight;
    }
  }
  for (; in_flight > 0; --in_flight) AwaitOne();
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

void PlainFile::Start(bool write, char* memory, int64_t offset) {
  io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
  FSDP_CHECK(entry != nullptr);
  if (write) {
    io_uring_prep_write(entry, descriptor_, memory, block_bytes_, offset);
  } else {
    io_uring_prep_read(entry, descriptor_, memory, block_bytes_, offset);
  }
  FSDP_CHECK(io_uring_submit(&ring_) == 1);
}

void PlainFile::AwaitOne() {
  io_uring_cqe* entry = nullptr;
  FSDP_CHECK(io_uring_wait_cqe(&ring_, &entry) == 0);
  FSDP_CHECK(entry->res == block_bytes_);
  io_uring_cqe_seen(&ring_, entry);
}

}  // namespace fsdp
