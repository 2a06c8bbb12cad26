// Fuzzers as tests: replays what is worth keeping, and mutations of it.
#ifndef BASE_TESTING_FUZZ_REPLAY_H_
#define BASE_TESTING_FUZZ_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::testing {

// LLVMFuzzerTestOneInput().
using FuzzTarget = int (*)(const uint8_t* data, size_t size);

// The files of `folder`, by rising name.
std::vector<std::string> ReadCorpus(const std::string& folder);

// Runs the empty input and each of `inputs`, and `mutations` of each: one to
// eight pieces that are changed, lost, inserted or repeated, among them numbers
// as a whole and what parsers trip over; the same ones every time. Fails the
// test when there are no inputs, or when one allocation takes more than 256
// times its input and 64 KiB. All else the target decides.
void ReplayFuzzer(FuzzTarget target, const std::vector<std::string>& inputs,
                  int mutations);

}  // namespace fsdp::testing

#endif  // BASE_TESTING_FUZZ_REPLAY_H_
