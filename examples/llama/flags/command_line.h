// Flags that several programs here have.
#ifndef EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
#define EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <iosfwd>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace llama {

// Reads the flags as fsdp::ParseCommandLine() does; "$0" in `usage` becomes the
// program's name. InvalidArgument: an argument is no flag.
absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        absl::string_view file);

// A flag for the frozen weights under adapters, which are kept in the dtype
// that the model computes in (kPrecision) or in int8.

enum class Base { kPrecision, kInt8 };

bool AbslParseFlag(absl::string_view text, Base* base, std::string* error);
std::string AbslUnparseFlag(Base base);

// Flags for the dtype that a model computes in, and for its device.

enum class Precision {
  kOfDevice,  // kBFloat16 if the device multiplies it fast, otherwise kFloat
  kFloat,
  kBFloat16,
};

// Returns kFloat or kBFloat16. If bfloat16 is asked for and slow, says so on
// `log`, which may be null.
c10::ScalarType DtypeOf(Precision precision, c10::DeviceType device,
                        std::ostream* log);

// Parses cpu or cuda. InvalidArgument: another name.
absl::StatusOr<c10::DeviceType> ParseDevice(absl::string_view name);

bool AbslParseFlag(absl::string_view text, Precision* precision,
                   std::string* error);
std::string AbslUnparseFlag(Precision precision);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
