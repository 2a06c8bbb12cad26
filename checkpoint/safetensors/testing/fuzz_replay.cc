#include "checkpoint/safetensors/testing/fuzz_replay.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace {
std::atomic<size_t> largest_allocation{0};
}  // namespace

// Of the whole program, to see what a parser asks for.
void* operator new(size_t size) {
  size_t largest = largest_allocation;
  while (size > largest &&
         !largest_allocation.compare_exchange_weak(largest, size)) {
  }
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace fsdp::checkpoint {
namespace {

// What parsers of formats trip over.
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

std::vector<std::string> Corpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
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

// Changes, removes, inserts or repeats bytes, or numbers as a whole.
void Mutate(std::mt19937& random, std::string& bytes) {
  const auto below = [&random](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  const size_t at = below(bytes.size());
  const size_t count = 1 + below(std::min<size_t>(bytes.size() - at, 40));
  const std::string token(kTokens[below(std::size(kTokens))]);
  switch (below(6)) {
    case 0:
      bytes[at] = static_cast<char>(below(256));
      break;
    case 1:
      bytes.erase(at, count);
      break;
    case 2:
      bytes.insert(at, token);
      break;
    case 3:
      bytes.insert(below(bytes.size()), bytes.substr(at, count));
      break;
    case 4:
      bytes.resize(at);
      break;
    default: {
      const size_t begin = bytes.find_first_of("0123456789", at);
      if (begin == std::string::npos) break;
      const size_t end = bytes.find_first_not_of("0123456789", begin);
      bytes.replace(begin, std::min(end, bytes.size()) - begin, token);
      break;
    }
  }
}

void RunOnce(FuzzTarget target, const std::string& bytes) {
  largest_allocation = 0;
  ASSERT_EQ(target(reinterpret_cast<const uint8_t*>(bytes.data()),  // NOLINT
                   bytes.size()),
            0);
  const size_t largest = largest_allocation;
  ASSERT_LE(largest, 256 * bytes.size() + (size_t{64} << 10));
}

}  // namespace

void ReplayFuzzer(FuzzTarget target, const FuzzReplay& replay) {
  const std::vector<std::string> corpus = Corpus(replay.corpus);
  ASSERT_FALSE(corpus.empty());
  RunOnce(target, "");
  std::mt19937 random(1);
  for (const std::string& seed : corpus) {
    RunOnce(target, seed);
    for (int i = 0; i < replay.mutations; ++i) {
      std::string bytes = seed;
      for (int j = 0; j < 1 + i % 4 && !bytes.empty(); ++j) {
        Mutate(random, bytes);
      }
      bytes.resize(std::min(bytes.size(), replay.max_bytes));
      RunOnce(target, bytes);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace fsdp::checkpoint
