// Memory that processes of one host map together.
#ifndef COMM_HOST_SHARED_SEGMENT_H_
#define COMM_HOST_SHARED_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp::comm {

// Where other processes find a segment as long as process `pid` keeps it open.
// Plain bytes, to be sent to processes of the host as they are.
struct SegmentAddress {
  int32_t pid = 0;
  int32_t descriptor = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t bytes = 0;

  // The same memory, whoever keeps it open.
  friend bool operator==(const SegmentAddress& a, const SegmentAddress& b) {
    return a.device == b.device && a.inode == b.inode;
  }
};

// A mapped segment. It has no name in any file system and lives as long as a
// process maps it, so that nothing is left behind whatever way processes end
// (memfd_create(2)). Unmapped by the destructor.
class SharedSegment {
 public:
  // `bytes` >= 0, zero. Pages take memory once they are touched.
  // ResourceExhausted where there is not as much.
  static absl::StatusOr<std::unique_ptr<SharedSegment>> Create(int64_t bytes);

  // Maps what another process, or this one, has made. Unavailable when it is
  // gone, smaller than it says, or out of this process' reach: another user's,
  // another container's.
  static absl::StatusOr<std::unique_ptr<SharedSegment>> Open(
      const SegmentAddress& address);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  // Aligned to a page.
  char* data() const { return data_; }
  int64_t bytes() const { return address_.bytes; }
  const SegmentAddress& address() const { return address_; }

  // Nobody can Open() it by address() from now on; who has it keeps it.
  void Seal();

 private:
  SharedSegment(SegmentAddress address, int descriptor, char* data)
      : address_(address), descriptor_(descriptor), data_(data) {}

  const SegmentAddress address_;
  int descriptor_;  // -1: sealed
  char* const data_;
};

// What two processes of one host that can reach each other's segments have in
// common, and others do not.
std::string HostIdentity();

}  // namespace fsdp::comm

#endif  // COMM_HOST_SHARED_SEGMENT_H_
