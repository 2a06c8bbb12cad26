// What a model computes in, and on which device, as flags.
#ifndef EXAMPLES_LLAMA_FLAGS_PRECISION_H_
#define EXAMPLES_LLAMA_FLAGS_PRECISION_H_

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <iosfwd>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace llama {

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

#endif  // EXAMPLES_LLAMA_FLAGS_PRECISION_H_
