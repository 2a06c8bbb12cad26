// `ulimit -f` for a test.
#ifndef BASE_TESTING_FILE_SIZE_LIMIT_H_
#define BASE_TESTING_FILE_SIZE_LIMIT_H_

#include <sys/resource.h>

#include <cstdint>

#include "base/check.h"

namespace fsdp::testing {

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

#endif  // BASE_TESTING_FILE_SIZE_LIMIT_H_
