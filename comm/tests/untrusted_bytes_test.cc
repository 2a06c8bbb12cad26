// Tests that whatever a peer or the store says is read as far as it goes, and
// refused if it cannot be.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"
#include "comm/host/shared_segment.h"
#include "comm/local/local_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Returns what rank 0 of two answers to a rank 1 that introduces itself so.
absl::Status MeetWith(const std::string& introduction) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto says = [&](const std::string& key, const std::string& value) {
    store->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  };
  says("hosts/1", absl::StrCat("/", HostIdentity()));
  says("segments/1", introduction);
  says("outcomes/1", "");
  SharedMemoryOptions options;
  options.timeout = absl::Seconds(30);
  return CreateSharedMemoryCommunicator(store, 0, 2, options).status();
}

std::string Introduce(const SegmentAddress& mailbox,
                      const SegmentAddress& block) {
  std::string bytes(2 * sizeof(SegmentAddress), '\0');
  std::memcpy(bytes.data(), &mailbox, sizeof(mailbox));
  std::memcpy(bytes.data() + sizeof(mailbox), &block, sizeof(block));
  return bytes;
}

TEST(UntrustedBytesTest, IntroductionsOfAnyLength) {
  const std::string whole = Introduce({}, {});
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THAT(
        MeetWith(whole.substr(0, size)),
        StatusIs(Code::kFailedPrecondition,
                 ::testing::AllOf(
                     HasSubstr("rank 1 introduces itself with "),
                     HasSubstr(absl::StrCat(" ", size, " bytes instead")))));
  }
  EXPECT_FALSE(MeetWith(whole + "x").ok());
  EXPECT_THAT(MeetWith(whole), StatusIs(Code::kFailedPrecondition,
                                        HasSubstr("that is nowhere")));
}

SegmentAddress AddressOf(int file, int64_t bytes) {
  struct stat status;
  EXPECT_EQ(fstat(file, &status), 0);
  SegmentAddress address;
  address.pid = getpid();
  address.descriptor = file;
  address.device = status.st_dev;
  address.inode = status.st_ino;
  address.bytes = bytes;
  return address;
}

// An access past the end of the file would end this process.
TEST(UntrustedBytesTest, SegmentsThatAreSmallerThanTheySay) {
  const int file = memfd_create("small", MFD_CLOEXEC);
  ASSERT_GE(file, 0);
  ASSERT_EQ(ftruncate(file, 100), 0);
  const auto refuses = [](absl::string_view text) {
    return StatusIs(Code::kFailedPrecondition, HasSubstr(std::string(text)));
  };
  const SegmentAddress larger = AddressOf(file, 4 << 20);
  EXPECT_THAT(MeetWith(Introduce(larger, larger)),
              refuses("shared memory of process"));
  // The segment is as large as it says, but no mailbox.
  const SegmentAddress small = AddressOf(file, 10);
  EXPECT_THAT(MeetWith(Introduce(small, small)),
              refuses("a mailbox of 10 bytes"));
  // This is a mailbox, but no block.
  auto mailbox = SharedSegment::Create(4096).value();
  EXPECT_THAT(MeetWith(Introduce(mailbox->address(), mailbox->address())),
              refuses("a block of 4096 bytes"));
  close(file);
  EXPECT_FALSE(SharedSegment::Open(small).ok());
}

TEST(UntrustedBytesTest, WhatIsNoMemory) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_THAT(SharedSegment::Open(AddressOf(ends[0], 0)),
              StatusIs(Code::kUnavailable, HasSubstr("it is no memory")));
  close(ends[0]);
  close(ends[1]);
}

TEST(UntrustedBytesTest, StatusesAsText) {
  const absl::Status status = absl::NotFoundError("no file of that name");
  const std::string text = EncodeStatus(status);
  EXPECT_EQ(DecodeStatus(text), status);
  for (const char* wrong : {"", "5", " text", "x text", "-1 text", "17 text",
                            "5.0 text", "99999999999 text", "\xff\xff \xff"}) {
    EXPECT_EQ(DecodeStatus(wrong), std::nullopt) << wrong;
  }
}

// Announces texts of `size` bytes.
class WrongSizes final : public ForwardingCommunicator {
 public:
  WrongSizes(std::shared_ptr<Communicator> base, int64_t size)
      : ForwardingCommunicator(std::move(base)), size_(size) {}

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    args.out.fill_(size_);
    return base().StartCollective(args, label);
  }

 private:
  const int64_t size_;
};

TEST(UntrustedBytesTest, SizesOfTexts) {
  for (const int64_t size :
       {int64_t{-1}, std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max(), int64_t{1} << 40}) {
    WrongSizes comm(std::move(CreateLocalGroup(1).value()[0]), size);
    EXPECT_THAT(
        BroadcastString(comm, "text", 0, "names", absl::InfiniteFuture()),
        StatusIs(Code::kInvalidArgument,
                 HasSubstr(absl::StrCat("a text of ", size, " bytes"))));
  }
}

}  // namespace
}  // namespace fsdp::comm
