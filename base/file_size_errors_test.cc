#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/output_file.h"
#include "base/testing/file_size_limit.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FileSizeLimit;

constexpr int kLimit = 7;

// Writes up to the limit and once more; errno of the latter, 0 for none.
int WriteBeyondTheLimit() {
  const FileSizeLimit limit(kLimit);
  const std::string path = ::testing::TempDir() + "/beyond";
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  const std::string text(kLimit, 'x');
  const bool is_full = write(file, text.data(), text.size()) == kLimit;
  errno = 0;
  const bool fails = write(file, "y", 1) < 0;
  const int error = errno;
  close(file);
  unlink(path.c_str());
  return is_full && fails ? error : 0;
}

bool IsBlocked() {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, SIGXFSZ) == 1;
}

bool IsPending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGXFSZ) == 1;
}

TEST(FileSizeErrorsTest, AWriteBeyondTheLimitFailsAndTheProcessLivesOn) {
  {
    const FileSizeErrors errors;
    EXPECT_EQ(WriteBeyondTheLimit(), EFBIG);
    EXPECT_EQ(WriteBeyondTheLimit(), EFBIG);
    EXPECT_TRUE(IsPending());
  }
  EXPECT_FALSE(IsPending());
  EXPECT_FALSE(IsBlocked());
}

TEST(FileSizeErrorsTest, TheOuterOneLasts) {
  const FileSizeErrors outer;
  { const FileSizeErrors inner; }
  EXPECT_TRUE(IsBlocked());
  EXPECT_EQ(WriteBeyondTheLimit(), EFBIG);
}

TEST(FileSizeErrorsTest, WhatWasBlockedBeforeStaysBlockedAndPending) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  raise(SIGXFSZ);
  { const FileSizeErrors errors; }
  EXPECT_TRUE(IsBlocked());
  EXPECT_TRUE(IsPending());
  int taken = 0;
  sigwait(&set, &taken);
  EXPECT_EQ(taken, SIGXFSZ);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

TEST(FileSizeErrorsDeathTest, WithoutOneTheProcessEnds) {
  EXPECT_EXIT(std::exit(WriteBeyondTheLimit()),
              ::testing::KilledBySignal(SIGXFSZ), "");
}

}  // namespace
}  // namespace fsdp
