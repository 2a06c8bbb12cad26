// The flags that say what rests outside of memory.
#ifndef TESTING_GPT_FLAGS_OFFLOAD_FLAGS_H_
#define TESTING_GPT_FLAGS_OFFLOAD_FLAGS_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fsdp/options/offload_options.h"

namespace gpt {

// Its text is "none", "cpu" or "ssd".
struct OffloadTier {
  fsdp::Tier tier = fsdp::Tier::kDevice;
};

// Its text is "parameters,optimizer", for example. By fsdp::RestingKind.
struct OffloadKinds {
  std::array<bool, fsdp::kNumRestingKinds> chosen = {true, true, true};
};

// Its text is "8GiB", "512MiB", "64KiB" or "4096", for example.
struct ByteCount {
  int64_t bytes = 0;
};

bool AbslParseFlag(absl::string_view text, OffloadTier* tier,
                   std::string* error);
std::string AbslUnparseFlag(OffloadTier tier);
bool AbslParseFlag(absl::string_view text, OffloadKinds* kinds,
                   std::string* error);
std::string AbslUnparseFlag(const OffloadKinds& kinds);
bool AbslParseFlag(absl::string_view text, ByteCount* count,
                   std::string* error);
std::string AbslUnparseFlag(ByteCount count);

struct OffloadFlags {
  OffloadTier tier;
  OffloadKinds kinds;
  std::string directory;  // empty: the one for temporary files
  ByteCount memory_budget;
  std::string keep;        // empty: files vanish with the run
  bool automatic = false;  // ChooseOptions() decides what rests there
};

// Returns InvalidArgument for flags that have no effect without --offload. The
// directory may be used by --auto, too.
absl::StatusOr<fsdp::OffloadOptions> ToOffloadOptions(
    const OffloadFlags& flags);

}  // namespace gpt

#endif  // TESTING_GPT_FLAGS_OFFLOAD_FLAGS_H_
