// Counts the operators that have drawn random numbers.
#ifndef BASE_TESTING_RANDOM_OPERATORS_H_
#define BASE_TESTING_RANDOM_OPERATORS_H_

#include <ATen/record_function.h>

#include <memory>

#include "absl/strings/match.h"

namespace fsdp::testing {

// Counts operators of this thread while this lives, one object per thread at a
// time.
class RandomOperators {
 public:
  RandomOperators()
      : handle_(
            at::addThreadLocalCallback(at::RecordFunctionCallback(&OnStart))) {
    count_ = 0;
  }
  RandomOperators(const RandomOperators&) = delete;
  RandomOperators& operator=(const RandomOperators&) = delete;
  ~RandomOperators() { at::removeCallback(handle_); }

  int count() const { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> OnStart(
      const at::RecordFunction& function) {
    for (const char* name : {"normal", "uniform", "rand", "bernoulli"}) {
      if (absl::StrContains(function.name(), name)) {
        ++count_;
        break;
      }
    }
    return nullptr;
  }

  static thread_local inline int count_ = 0;
  const at::CallbackHandle handle_;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_RANDOM_OPERATORS_H_
