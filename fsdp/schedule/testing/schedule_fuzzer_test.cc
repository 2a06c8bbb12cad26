// Random models and steps, the fuzzer's corpus, and mutations of it.
#include "fsdp/schedule/testing/schedule_fuzzer.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fsdp/schedule/testing/choices.h"
#include "fsdp/schedule/testing/schedule_run.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr char kCorpus[] = "fsdp/schedule/testing/schedule_corpus";
constexpr int kMutations = 200;  // of each seed

std::vector<Bytes> Corpus() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(kCorpus)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file),
                        std::istreambuf_iterator<char>());
  }
  return corpus;
}

void Replay(const Bytes& bytes) {
  ASSERT_EQ(LLVMFuzzerTestOneInput(bytes.data(), bytes.size()), 0);
}

// Changes, removes, inserts or repeats bytes.
void Mutate(std::mt19937& random, Bytes& bytes) {
  const auto below = [&random](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  const size_t at = below(bytes.size());
  const auto position = bytes.begin() + static_cast<std::ptrdiff_t>(at);
  switch (below(4)) {
    case 0:
      bytes[at] = static_cast<uint8_t>(below(256));
      break;
    case 1:
      bytes.erase(position);
      break;
    case 2:
      bytes.insert(position, static_cast<uint8_t>(below(256)));
      break;
    default: {
      const Bytes tail(position, bytes.end());
      bytes.insert(bytes.end(), tail.begin(), tail.end());
      bytes.resize(std::min<size_t>(bytes.size(), 4096));
      break;
    }
  }
}

TEST(SchedulePropertyTest, AMillionEventsOfRandomModelsKeepTheRules) {
  constexpr int kStepsPerModel = 8;
  int64_t num_events = 0;
  for (uint32_t seed = 0; num_events < 1'000'000; ++seed) {
    SeededChoices choices(seed);
    const ScheduleRun run = RunSchedule(&choices, kStepsPerModel);
    ASSERT_EQ(run.error, "") << "seed " << seed;
    num_events += run.num_events;
  }
}

TEST(ScheduleFuzzerTest, TheCorpusKeepsTheRules) {
  const std::vector<Bytes> corpus = Corpus();
  ASSERT_FALSE(corpus.empty());
  for (const Bytes& seed : corpus) Replay(seed);
}

TEST(ScheduleFuzzerTest, MutationsOfTheCorpusKeepTheRules) {
  std::mt19937 random(1);
  for (const Bytes& seed : Corpus()) {
    for (int i = 0; i < kMutations; ++i) {
      Bytes bytes = seed;
      for (int j = 0; j < 1 + i % 8 && !bytes.empty(); ++j) {
        Mutate(random, bytes);
      }
      Replay(bytes);
    }
  }
}

TEST(ScheduleFuzzerTest, AnyFewBytesKeepTheRules) {
  Replay({});
  std::mt19937 random(2);
  for (int first = 0; first < 256; ++first) {
    Bytes bytes = {static_cast<uint8_t>(first)};
    for (int i = 0; i < 40; ++i) {
      Replay(bytes);
      bytes.push_back(static_cast<uint8_t>(random()));
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
