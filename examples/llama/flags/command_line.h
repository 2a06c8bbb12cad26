// Flags that several programs here have.
#ifndef EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
#define EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/command_line.h"

namespace llama {

// Reads the flags as fsdp::ParseCommandLine() does; "$0" in `usage` becomes the
// program's name. InvalidArgument: an argument is no flag.
absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        absl::string_view file);

// Flags of an enum, all of whose values NamesOf(T) names.

template <typename T>
using FlagNames = std::vector<std::pair<T, std::string>>;

template <typename T, typename = decltype(NamesOf(T()))>
bool AbslParseFlag(absl::string_view text, T* value, std::string* error) {
  *error = "expected ";
  const FlagNames<T> names = NamesOf(T());
  for (size_t i = 0; i < names.size(); ++i) {
    *value = names[i].first;
    if (text == names[i].second) return true;
    const bool is_last = i + 1 == names.size();
    absl::StrAppend(error,
                    is_last ? " or "
                    : i > 0 ? ", "
                            : "",
                    names[i].second);
  }
  return false;
}

template <typename T, typename = decltype(NamesOf(T()))>
std::string AbslUnparseFlag(T value) {
  for (const auto& [each, name] : NamesOf(T())) {
    if (each == value) return name;
  }
  return "";
}

// Sets `value` to that of a flag. InvalidArgument: it is less than `least`.
template <typename T>
absl::Status AtLeast(int64_t least, const absl::Flag<T>& flag, T& value) {
  value = absl::GetFlag(flag);
  if (value >= least) return absl::OkStatus();
  return fsdp::InvalidFlag(flag, value, absl::StrCat("take at least ", least));
}

// Frozen weights under adapters are kept in the dtype that the model computes
// in, or in int8.
enum class Base { kPrecision, kInt8 };
inline FlagNames<Base> NamesOf(Base) {
  return {{Base::kPrecision, "precision"}, {Base::kInt8, "int8"}};
}

// Flags for the dtype that a model computes in, and for its device.

enum class Precision {
  kOfDevice,  // kBFloat16 if the device multiplies it fast, otherwise kFloat
  kFloat,
  kBFloat16,
};
inline FlagNames<Precision> NamesOf(Precision) {
  return {{Precision::kOfDevice, "auto"},
          {Precision::kFloat, "fp32"},
          {Precision::kBFloat16, "bf16"}};
}

// Returns kFloat or kBFloat16. If bfloat16 is asked for and slow, says so on
// `log`, which may be null.
c10::ScalarType DtypeOf(Precision precision, c10::DeviceType device,
                        std::ostream* log);

// Parses cpu or cuda. InvalidArgument: another name.
absl::StatusOr<c10::DeviceType> ParseDevice(absl::string_view name);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
