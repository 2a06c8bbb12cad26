// FSDP_CHECK stops the program when an invariant of our own code is broken.
// Errors that a user or the world can cause are an absl::Status instead.
#ifndef BASE_CHECK_H_
#define BASE_CHECK_H_

#include <cstdio>
#include <cstdlib>

#include "absl/base/optimization.h"

#define FSDP_CHECK(condition)                                         \
  do {                                                                \
    if (ABSL_PREDICT_FALSE(!(condition))) {                           \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, \
                   __LINE__, #condition);                             \
      std::abort();                                                   \
    }                                                                 \
  } while (false)

#endif  // BASE_CHECK_H_
