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

// While this exists, this process has no more of a resource: files do not grow
// beyond so many bytes (RLIMIT_FSIZE), or no file is opened (RLIMIT_NOFILE, 0).
class ResourceLimit {
 public:
  using Resource = decltype(RLIMIT_FSIZE);

  ResourceLimit(Resource resource, int64_t most) : resource_(resource) {
    FSDP_CHECK(getrlimit(resource, &previous_) == 0);
    rlimit limit = previous_;
    limit.rlim_cur = static_cast<rlim_t>(most);
    FSDP_CHECK(setrlimit(resource, &limit) == 0);
  }
  ResourceLimit(const ResourceLimit&) = delete;
  ResourceLimit& operator=(const ResourceLimit&) = delete;
  ~ResourceLimit() { setrlimit(resource_, &previous_); }

 private:
  const Resource resource_;
  rlimit previous_;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_PROCESS_LIMITS_H_
