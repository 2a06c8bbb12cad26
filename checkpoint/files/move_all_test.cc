#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <utility>
#include <vector>

#include "checkpoint/files/new_path.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::testing::ElementsAre;

// What one call does: moves so many bytes, or fails with an errno.
struct Call {
  ssize_t count;
  int error = 0;
};

struct Moved {
  Moved(int64_t bytes, std::vector<Call> calls) {
    errno = EPERM;
    done = MoveAll(bytes, [&](int64_t at) -> ssize_t {
      offsets.push_back(at);
      const Call call = calls.at(offsets.size() - 1);
      if (call.count < 0) errno = call.error;
      return call.count;
    });
    error = errno;
  }

  std::vector<int64_t> offsets;
  int64_t done = 0;
  int error = 0;
};

TEST(MoveAllTest, GoesOnWhereACallHasStopped) {
  const Moved moved(10, {{4}, {1}, {5}});
  EXPECT_EQ(moved.done, 10);
  EXPECT_THAT(moved.offsets, ElementsAre(0, 4, 5));
}

TEST(MoveAllTest, AnInterruptedCallIsMadeAgain) {
  const Moved moved(10, {{-1, EINTR}, {4}, {-1, EINTR}, {6}});
  EXPECT_EQ(moved.done, 10);
  EXPECT_THAT(moved.offsets, ElementsAre(0, 0, 4, 4));
}

TEST(MoveAllTest, EndsWithTheFirstError) {
  const Moved moved(10, {{4}, {-1, ENOSPC}});
  EXPECT_EQ(moved.done, 4);
  EXPECT_EQ(moved.error, ENOSPC);
}

TEST(MoveAllTest, EndsWhereNothingIsLeft) {
  const Moved moved(10, {{4}, {0}});
  EXPECT_EQ(moved.done, 4);
  EXPECT_EQ(moved.error, 0);
}

TEST(MoveAllTest, NothingToMoveIsNoCall) {
  const Moved moved(0, {});
  EXPECT_EQ(moved.done, 0);
  EXPECT_THAT(moved.offsets, ElementsAre());
}

}  // namespace
}  // namespace fsdp::checkpoint
