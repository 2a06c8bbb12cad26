// Limits of this process, for a test.
#ifndef BASE_TESTING_PROCESS_LIMITS_H_
#define BASE_TESTING_PROCESS_LIMITS_H_

#include <pthread.h>
#include <sys/resource.h>

#include <cstdint>

#include "base/check.h"

namespace fsdp::testing {

// While this exists, no thread of this process can be started: none gets a
// stack. Limits on processes would not bind root.
class NoThreads {
 public:
  NoThreads() {
    FSDP_CHECK(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t none;
    FSDP_CHECK(pthread_attr_init(&none) == 0);
    FSDP_CHECK(pthread_attr_setstacksize(&none, size_t{1} << 47) == 0);
    FSDP_CHECK(pthread_setattr_default_np(&none) == 0);
    pthread_attr_destroy(&none);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

// While this exists, no file of this process grows beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(int64_t bytes) {
    FSDP_CHECK(getrlimit(RLIMIT_FSIZE, &previous_) == 0);
    rlimit limit = previous_;
    limit.rlim_cur = static_cast<rlim_t>(bytes);
    FSDP_CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &previous_); }

 private:
  rlimit previous_;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_PROCESS_LIMITS_H_
