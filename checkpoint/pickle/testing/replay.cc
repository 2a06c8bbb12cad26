#include "checkpoint/pickle/testing/replay.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"

namespace fsdp::checkpoint::testing {
namespace {

void Run(const FuzzEntry& entry, const std::string& bytes) {
  // On the heap and of this very size, so that asan sees what lies behind it.
  const std::vector<uint8_t> copy(bytes.begin(), bytes.end());
  FSDP_CHECK(entry(copy.data(), copy.size()) == 0);
}

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  void Change(std::string& bytes) {
    if (bytes.empty()) return;
    const size_t at = Below(bytes.size());
    const size_t count = std::min(1 + Below(16), bytes.size() - at);
    switch (Below(6)) {
      case 0:
        bytes[at] = static_cast<char>(Below(256));
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
        break;
      case 2:
        bytes.erase(at, count);
        break;
      case 3:
        bytes.insert(at, 1, static_cast<char>(Below(256)));
        break;
      case 4:
        bytes.insert(Below(bytes.size()), bytes.substr(at, count));
        break;
      default:
        // Sizes and offsets at their limits.
        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    std::min<size_t>(count, 8),
                    static_cast<char>(Below(2) == 0 ? 0 : 0xff));
        break;
    }
  }

  size_t Below(size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random_);
  }

 private:
  std::mt19937 random_;
};

}  // namespace

std::vector<std::string> ReadCorpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  FSDP_CHECK(!paths.empty());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file),
                        std::istreambuf_iterator<char>());
  }
  return corpus;
}

void Replay(const FuzzEntry& entry, const std::vector<std::string>& inputs,
            int mutations) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    Run(entry, inputs[i]);
    Mutator mutator(static_cast<uint32_t>(i + 1));
    for (int j = 0; j < mutations; ++j) {
      std::string bytes = inputs[i];
      const size_t changes = 1 + mutator.Below(8);
      for (size_t k = 0; k < changes; ++k) mutator.Change(bytes);
      Run(entry, bytes);
    }
  }
}

}  // namespace fsdp::checkpoint::testing
