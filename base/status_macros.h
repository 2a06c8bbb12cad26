// Early-return macros for absl::Status and absl::StatusOr.
#ifndef BASE_STATUS_MACROS_H_
#define BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

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

#endif  // BASE_STATUS_MACROS_H_
