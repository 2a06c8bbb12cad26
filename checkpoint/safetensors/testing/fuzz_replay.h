// Fuzzers as tests: replays what is worth keeping, and mutations of it.
#ifndef CHECKPOINT_SAFETENSORS_TESTING_FUZZ_REPLAY_H_
#define CHECKPOINT_SAFETENSORS_TESTING_FUZZ_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace fsdp::checkpoint {

// LLVMFuzzerTestOneInput().
using FuzzTarget = int (*)(const uint8_t* data, size_t size);

struct FuzzReplay {
  std::string corpus;       // a folder
  int mutations = 10000;    // of each file in it, by fixed seeds
  size_t max_bytes = 8192;  // of a mutation
};

// Fails the test when there is no corpus, or when one allocation takes more
// than 256 times its input and 64 KiB. All else the target decides.
void ReplayFuzzer(FuzzTarget target, const FuzzReplay& replay);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAFETENSORS_TESTING_FUZZ_REPLAY_H_
