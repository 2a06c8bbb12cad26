#include "checkpoint/tests/covering.h"

#include <cstddef>
#include <random>
#include <set>
#include <tuple>

namespace fsdp::checkpoint::testing {
namespace {

// Level, choice, later level, choice.
using Pair = std::tuple<size_t, int, size_t, int>;

std::set<Pair> PairsOf(const std::vector<int>& row) {
  std::set<Pair> pairs;
  for (size_t i = 0; i < row.size(); ++i) {
    for (size_t j = i + 1; j < row.size(); ++j) {
      pairs.insert({i, row[i], j, row[j]});
    }
  }
  return pairs;
}

std::set<Pair> AllPairs(const std::vector<int>& levels) {
  std::set<Pair> pairs;
  for (size_t i = 0; i < levels.size(); ++i) {
    for (size_t j = i + 1; j < levels.size(); ++j) {
      for (int a = 0; a < levels[i]; ++a) {
        for (int b = 0; b < levels[j]; ++b) pairs.insert({i, a, j, b});
      }
    }
  }
  return pairs;
}

}  // namespace

std::vector<std::vector<int>> CoverPairs(const std::vector<int>& levels) {
  constexpr int kTries = 50;
  std::mt19937 random(1);
  std::set<Pair> missing = AllPairs(levels);
  std::vector<std::vector<int>> rows;
  while (!missing.empty()) {
    // The best of some rows that have the first missing pair.
    std::vector<int> best;
    size_t best_count = 0;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      std::vector<int> row;
      row.reserve(levels.size());
      for (const int level : levels) {
        row.push_back(static_cast<int>(random() % level));
      }
      const auto& [i, a, j, b] = *missing.begin();
      row[i] = a;
      row[j] = b;
      size_t count = 0;
      for (const Pair& pair : PairsOf(row)) count += missing.count(pair);
      if (count <= best_count) continue;
      best = row;
      best_count = count;
    }
    for (const Pair& pair : PairsOf(best)) missing.erase(pair);
    rows.push_back(best);
  }
  return rows;
}

std::vector<std::vector<int>> AllOf(const std::vector<int>& levels) {
  std::vector<std::vector<int>> rows = {{}};
  for (const int level : levels) {
    std::vector<std::vector<int>> longer;
    for (const std::vector<int>& row : rows) {
      for (int choice = 0; choice < level; ++choice) {
        longer.push_back(row);
        longer.back().push_back(choice);
      }
    }
    rows = std::move(longer);
  }
  return rows;
}

}  // namespace fsdp::checkpoint::testing
