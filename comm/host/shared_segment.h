// Memory that processes of one host map together, and whether they still run.
#ifndef COMM_HOST_SHARED_SEGMENT_H_
#define COMM_HOST_SHARED_SEGMENT_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

// Other processes find a segment at this address as long as process `pid` keeps
// it open. Its bytes may be sent to processes of the host as they are.
struct SegmentAddress {
  int32_t pid = 0;
  int32_t descriptor = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t bytes = 0;

  // False for the address of nothing.
  bool exists() const { return descriptor >= 0; }

  // True for the same memory, whichever process keeps it open.
  friend bool operator==(const SegmentAddress& a, const SegmentAddress& b) {
    return a.device == b.device && a.inode == b.inode;
  }
};

// A mapped segment. It has no name in any file system and lives as long as a
// process maps it, so that nothing is left behind however processes end
// (memfd_create(2)). The destructor unmaps it.
class SharedSegment {
 public:
  // Makes `bytes` >= 0 of zeros. Pages take memory once they are touched.
  // ResourceExhausted: there is not enough memory, no descriptor is left, or
  // `ulimit -f` is too small.
  static absl::StatusOr<std::unique_ptr<SharedSegment>> Create(int64_t bytes);

  // Maps the segment of another process, or of this one. Unavailable: it is
  // gone, is smaller than the address says, or belongs to another user or
  // container.
  static absl::StatusOr<std::unique_ptr<SharedSegment>> Open(
      const SegmentAddress& address);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  // Aligned to a page.
  char* data() const { return data_; }
  int64_t bytes() const { return address_.bytes; }
  const SegmentAddress& address() const { return address_; }

  // Lets nobody Open() it by address() any more. Existing mappings stay.
  void Seal();

 private:
  SharedSegment(SegmentAddress address, int descriptor, char* data)
      : address_(address), descriptor_(descriptor), data_(data) {}

  const SegmentAddress address_;
  int descriptor_;  // -1: sealed
  char* const data_;
};

// Returns the number behind `key` at the beginning of a line of a file, as in
// "VmRSS:   1234 kB", or `otherwise`.
int64_t NumberAfter(absl::string_view key, const std::string& path,
                    int64_t otherwise);

// Returns about how many bytes are free on the machine, or in the tightest of
// the process's control groups if that is less. Files that a group has cached
// count as free. Returns the largest int64_t if the system does not say. /proc
// and what is mounted are looked for under `root`.
int64_t AvailableMemory(const std::string& root = "");

// Returns a text that is equal exactly in processes of one host that can reach
// each other's segments.
std::string HostIdentity();

// Watches one process from its construction on. A later process with the same
// number is not mistaken for it. Thread-compatible.
class PeerProcess {
 public:
  explicit PeerProcess(pid_t pid);
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;
  ~PeerProcess();

  pid_t pid() const { return pid_; }

  // True once it has ended, even if its parent has not waited for it yet.
  bool HasEnded() const;

  // Returns "process 4711 has ended", "... is stopped" or "... runs".
  std::string Describe() const;

 private:
  const pid_t pid_;
  const bool is_self_;
  const int descriptor_;       // -1: this process, or there is no pidfd_open(2)
  const std::string started_;  // start time, as the kernel says
};

}  // namespace fsdp::comm

#endif  // COMM_HOST_SHARED_SEGMENT_H_
