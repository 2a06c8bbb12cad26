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

// "none", "cpu" or "ssd".
struct OffloadTier {
  fsdp::Tier tier = fsdp::Tier::kDevice;
};

// "parameters,optimizer", for example. Indexed by fsdp::RestingKind.
struct OffloadKinds {
  std::array<bool, fsdp::kNumRestingKinds> chosen = {true, true, true};
};

// "8GiB", "512MiB", "64KiB" or "4096".
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
  std::string directory;  // empty: that for temporary files
  ByteCount memory_budget;
  std::string keep;        // empty: files vanish with the run
  bool automatic = false;  // what rests there is chosen
};

// InvalidArgument for flags that have no effect without --offload. The
// directory has one with --auto, which may use it.
absl::StatusOr<fsdp::OffloadOptions> ToOffloadOptions(
    const OffloadFlags& flags);

}  // namespace gpt

#endif  // TESTING_GPT_FLAGS_OFFLOAD_FLAGS_H_
