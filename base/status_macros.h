// Passes errors on: early-return macros for absl::Status and absl::StatusOr, a
// text in front of one, and an exception for code that cannot return one.
#ifndef BASE_STATUS_MACROS_H_
#define BASE_STATUS_MACROS_H_

#include <stdexcept>
#include <string>
#include <utility>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

// Returns from the enclosing function when `expr`, a Status, is not OK.
#define FSDP_RETURN_IF_ERROR(expr)                            \
  do {                                                        \
    if (absl::Status fsdp_status_macro_result = (expr);       \
        ABSL_PREDICT_FALSE(!fsdp_status_macro_result.ok())) { \
      return fsdp_status_macro_result;                        \
    }                                                         \
  } while (false)

// Assigns the value of `expr`, a StatusOr<T>, to `lhs`, which may declare a
// variable; returns from the enclosing function when there is no value. A
// comma in `lhs` needs parentheses around it to be told from an argument.
#define FSDP_ASSIGN_OR_RETURN(lhs, expr) \
  FSDP_ASSIGN_OR_RETURN_IMPL_(           \
      FSDP_STATUS_MACROS_CONCAT_(fsdp_status_or_, __LINE__), lhs, expr)

#define FSDP_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                \
  if (ABSL_PREDICT_FALSE(!statusor.ok())) {              \
    return std::move(statusor).status();                 \
  }                                                      \
  lhs = *std::move(statusor)

#define FSDP_STATUS_MACROS_CONCAT_INNER_(a, b) a##b
#define FSDP_STATUS_MACROS_CONCAT_(a, b) FSDP_STATUS_MACROS_CONCAT_INNER_(a, b)

namespace fsdp {

// Returns an error with "`what`: " in front of its message; code and payloads
// stay.
inline absl::Status Annotate(const absl::Status& status,
                             absl::string_view what) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(),
                         absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload([&annotated](absl::string_view key, const auto& value) {
    annotated.SetPayload(key, value);
  });
  return annotated;
}
template <typename T>
absl::StatusOr<T> Annotate(absl::StatusOr<T> result, absl::string_view what) {
  if (result.ok()) return result;
  return Annotate(result.status(), what);
}

// The library's one exception type: an absl::Status for code that cannot return
// one, such as a module's forward or an autograd node.
class StatusError : public std::runtime_error {
 public:
  explicit StatusError(absl::Status status)
      : std::runtime_error(std::string(status.message())),
        status_(std::move(status)) {}

  // The Status that was thrown, with its code; what() is its message alone.
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// Throws StatusError when `status` is not OK.
inline void ThrowIfError(absl::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

// Returns the value of `result`; throws StatusError if there is none.
template <typename T>
T ValueOrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) throw StatusError(std::move(result).status());
  return *std::move(result);
}

}  // namespace fsdp

#endif  // BASE_STATUS_MACROS_H_
