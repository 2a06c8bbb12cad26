// What the command lines of all programs here have in common.
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

// Reads the flags. --help, for which it exits, as it does for what cannot be
// parsed, says `usage` and names the flags of the source files with `file` in
// their names. InvalidArgument: an argument that is no flag.
absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        const std::string& file);

// A path as the user meant it, also under `bazel run`; an empty one stays so.
std::string ResolvePath(const std::string& path);

// What the frozen weights under adapters rest in, as a flag: precision, that in
// which the model computes, or int8.

enum class Base { kPrecision, kInt8 };

bool AbslParseFlag(absl::string_view text, Base* base, std::string* error);
std::string AbslUnparseFlag(Base base);

// What a model computes in, and on which device, as flags.

enum class Precision {
  kOfDevice,  // kBFloat16 where the device multiplies it fast, else kFloat
  kFloat,
  kBFloat16,
};

// kFloat or kBFloat16. Where the latter is asked for and slow, that is said on
// `log`, which may be null.
c10::ScalarType DtypeOf(Precision precision, c10::DeviceType device,
                        std::ostream* log);

// cpu or cuda. InvalidArgument: another.
absl::StatusOr<c10::DeviceType> ParseDevice(absl::string_view name);

bool AbslParseFlag(absl::string_view text, Precision* precision,
                   std::string* error);
std::string AbslUnparseFlag(Precision precision);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_COMMAND_LINE_H_
