// Recorded inputs for parsers, and mutations of them.
#ifndef CHECKPOINT_PICKLE_TESTING_REPLAY_H_
#define CHECKPOINT_PICKLE_TESTING_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::checkpoint::testing {

// What libFuzzer calls.
using FuzzEntry = std::function<int(const uint8_t* data, size_t size)>;

// The files of `folder`, by rising name; stops the program where it has none.
std::vector<std::string> ReadCorpus(const std::string& folder);

// Runs each input, then `mutations` of it: one to eight changed, lost, inserted
// or repeated pieces, the same ones every time.
void Replay(const FuzzEntry& entry, const std::vector<std::string>& inputs,
            int mutations);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_PICKLE_TESTING_REPLAY_H_
