// Makes tensors that outlive a call, whatever mode the caller is in.
#ifndef BASE_NORMAL_MODE_H_
#define BASE_NORMAL_MODE_H_

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace fsdp {

// While this lives, tensors that this thread makes are ordinary ones, even
// inside a c10::InferenceMode of the caller, whose tensors could never be
// trained. Autograd records nothing.
class NormalMode {
 public:
  NormalMode() {
    if (c10::InferenceMode::is_enabled()) leave_.emplace(/*enabled=*/false);
    no_grad_.emplace();
  }
  NormalMode(const NormalMode&) = delete;
  NormalMode& operator=(const NormalMode&) = delete;

 private:
  std::optional<c10::InferenceMode> leave_;
  std::optional<c10::NoGradGuard> no_grad_;  // ends first
};

}  // namespace fsdp

#endif  // BASE_NORMAL_MODE_H_
