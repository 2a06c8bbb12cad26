// The texts of LibTorch's errors.
#ifndef FLAT_PARAM_TESTING_ERROR_TEXT_H_
#define FLAT_PARAM_TESTING_ERROR_TEXT_H_

#include <c10/util/Exception.h>

#include <functional>
#include <string>

namespace fsdp::flat_param::testing {

// Returns the text of the c10::Error that `access` throws, or "" if it throws
// none.
inline std::string ErrorText(const std::function<void()>& access) {
  try {
    access();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace fsdp::flat_param::testing

#endif  // FLAT_PARAM_TESTING_ERROR_TEXT_H_
