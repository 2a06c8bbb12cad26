// Runs a fuzzer as a test, with its corpus and mutations of it. It is linked to
// a source that defines LLVMFuzzerTestOneInput(), by cc_fuzz_test() of
// tools/rules/cc.bzl.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/testing/allocations.h"
#include "gtest/gtest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fsdp::testing {
namespace {

// Tokens that parsers of formats trip over.
constexpr absl::string_view kTokens[] = {"0",
                                         "-1",
                                         "1",
                                         "4611686018427387904",
                                         "9223372036854775807",
                                         "18446744073709551615",
                                         "1e3",
                                         "0.5",
                                         "null",
                                         "\"\"",
                                         "[]",
                                         "{}",
                                         "[",
                                         "{\"a\":",
                                         ",",
                                         "\\u0000",
                                         "../",
                                         "\xFF",
                                         "\"__metadata__\":",
                                         "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F"};

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  std::string Mutate(std::string bytes) {
    const size_t changes = 1 + Below(8);
    for (size_t i = 0; i < changes && !bytes.empty(); ++i) Change(bytes);
    return bytes;
  }

 private:
  void Change(std::string& bytes) {
    const size_t at = Below(bytes.size());
    const size_t count = 1 + Below(std::min<size_t>(bytes.size() - at, 40));
    switch (Below(9)) {
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
        bytes.insert(at, std::string(Token()));
        break;
      case 5:
        bytes.insert(Below(bytes.size()), bytes.substr(at, count));
        break;
      case 6:
        bytes.resize(at);
        break;
      case 7:
        // These are limits of sizes and offsets in binary formats.
        std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    std::min<size_t>(count, 8),
                    static_cast<char>(Below(2) == 0 ? 0 : 0xFF));
        break;
      default:
        ReplaceNumber(at, bytes);
        break;
    }
  }

  // Replaces the first number from `at` on.
  void ReplaceNumber(size_t at, std::string& bytes) {
    const size_t begin = bytes.find_first_of("0123456789", at);
    if (begin == std::string::npos) return;
    const size_t end = bytes.find_first_not_of("0123456789", begin);
    bytes.replace(begin, std::min(end, bytes.size()) - begin,
                  std::string(Token()));
  }

  absl::string_view Token() { return kTokens[Below(std::size(kTokens))]; }

  size_t Below(size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random_);
  }

  std::mt19937 random_;
};

void RunOnce(const std::string& bytes) {
  // The copy on the heap has this very size, so that asan sees what lies behind
  // it.
  const std::vector<uint8_t> copy(bytes.begin(), bytes.end());
  Allocations::Start();
  const int result = LLVMFuzzerTestOneInput(copy.data(), copy.size());
  const size_t largest = Allocations::Largest();
  ASSERT_EQ(result, 0);
  ASSERT_LE(largest, 256 * bytes.size() + (size_t{64} << 10));
}

// Returns the files of `folder`, sorted by name.
std::vector<std::string> ReadCorpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file),
                        std::istreambuf_iterator<char>());
  }
  return corpus;
}

// Changes, loses, inserts or repeats one to eight pieces of each file, among
// them whole numbers and tokens; the mutations are the same every time. No
// allocation may take more than 256 times its input and 64 KiB. The fuzzer
// decides all else.
TEST(FuzzerTest, TheCorpusAndMutationsOfIt) {
  const char* const folder = std::getenv("FUZZ_CORPUS");
  const char* const mutations = std::getenv("FUZZ_MUTATIONS");
  ASSERT_TRUE(folder != nullptr && mutations != nullptr);
  const std::vector<std::string> inputs = ReadCorpus(folder);
  ASSERT_FALSE(inputs.empty());
  RunOnce("");
  Mutator mutator(/*seed=*/1);
  for (const std::string& input : inputs) {
    RunOnce(input);
    for (int i = 0; i < std::atoi(mutations); ++i) {
      RunOnce(mutator.Mutate(input));
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
