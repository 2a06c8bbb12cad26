// Gives comm/host's SharedSegment and PeerProcess what the kernel does for
// them, over the memory and the processes of a Machine.
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "comm/host/shared_segment.h"
#include "testing/interleavings/machine.h"

namespace fsdp::comm {
namespace {

using ::fsdp::interleavings::Arena;
using ::fsdp::interleavings::Machine;

Machine& TheMachine() {
  FSDP_CHECK(Machine::Current() != nullptr);
  return *Machine::Current();
}

SegmentAddress AddressOf(int rank, int number, const Arena::Segment& segment) {
  SegmentAddress address;
  address.pid = Arena::kFirstPid + rank;
  address.descriptor = number;
  address.device = 1;
  address.inode = static_cast<uint64_t>(number) + 1;
  address.bytes = segment.bytes;
  return address;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedSegment>> SharedSegment::Create(
    int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot allocate ", bytes, " bytes"));
  }
  Machine& machine = TheMachine();
  const int rank = machine.current_rank();
  const int number = machine.arena().Create(rank, bytes);
  const Arena::Segment& segment = *machine.arena().segment(number);
  return std::unique_ptr<SharedSegment>(
      new SharedSegment(AddressOf(rank, number, segment), number,
                        machine.arena().Data(rank, segment)));
}

absl::StatusOr<std::unique_ptr<SharedSegment>> SharedSegment::Open(
    const SegmentAddress& address) {
  Machine& machine = TheMachine();
  const int rank = machine.current_rank();
  const int owner = address.pid - Arena::kFirstPid;
  FSDP_CHECK(owner >= 0 && owner < Arena::kMaxRanks);
  machine.TouchSegment(address.descriptor, /*writes=*/false);
  if (machine.HasEnded(owner)) {
    return absl::UnavailableError("the process is no more");
  }
  Arena::Segment* segment = machine.arena().segment(address.descriptor);
  if (segment == nullptr || segment->descriptors[owner] == 0) {
    return absl::UnavailableError("open: the process has given it back");
  }
  ++segment->mappings[rank];
  ++segment->descriptors[rank];
  return std::unique_ptr<SharedSegment>(new SharedSegment(
      AddressOf(rank, address.descriptor, *segment), address.descriptor,
      machine.arena().Data(rank, *segment)));
}

SharedSegment::~SharedSegment() {
  Machine& machine = TheMachine();
  Seal();
  const int number = static_cast<int>(address_.inode) - 1;
  const int rank = address_.pid - Arena::kFirstPid;
  --machine.arena().segment(number)->mappings[rank];
}

void SharedSegment::Seal() {
  if (descriptor_ < 0) return;
  Machine& machine = TheMachine();
  machine.TouchSegment(descriptor_, /*writes=*/true);
  const int rank = address_.pid - Arena::kFirstPid;
  --machine.arena().segment(descriptor_)->descriptors[rank];
  descriptor_ = -1;
}

std::string HostIdentity() { return "a machine"; }

PeerProcess::PeerProcess(pid_t pid)
    : pid_(pid),
      is_self_(pid == Arena::kFirstPid + TheMachine().current_rank()),
      descriptor_(-1) {}

PeerProcess::~PeerProcess() = default;

bool PeerProcess::HasEnded() const {
  return !is_self_ && TheMachine().HasEnded(pid_ - Arena::kFirstPid);
}

std::string PeerProcess::Describe() const {
  return absl::StrCat("process ", pid_, HasEnded() ? " has ended" : " runs");
}

}  // namespace fsdp::comm
