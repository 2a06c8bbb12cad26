#include "checkpoint/files/testing/simulated_node.h"

#include <algorithm>

namespace fsdp::checkpoint::testing {
namespace {

bool Coin(std::mt19937_64& random) { return (random() & 1) != 0; }

// Returns the group of each name; names that a rename joins are in one.
std::map<std::string, std::string> Groups(
    const std::vector<std::pair<std::string, std::string>>& renamed) {
  std::map<std::string, std::string> groups;
  for (const auto& [from, to] : renamed) {
    const std::string one = groups.emplace(from, from).first->second;
    const std::string other = groups.emplace(to, to).first->second;
    for (auto& [name, group] : groups) {
      if (group == other) group = one;
    }
  }
  return groups;
}

}  // namespace

void SimulatedFileSystem::Node::Synced() {
  synced_bytes = bytes;
  dirty_pages.clear();
  since_sync.clear();
  renamed.clear();
}

int64_t SimulatedFileSystem::Node::Bytes() const {
  auto sum = static_cast<int64_t>(bytes.size());
  for (const auto& [name, node] : entries) sum += node->Bytes();
  return sum;
}

void SimulatedFileSystem::Node::LosePower(std::mt19937_64& random) {
  if (!is_folder) {
    LosePages(random);
    return;
  }
  LoseEntries(random);
  for (const auto& [name, node] : entries) node->LosePower(random);
}

void SimulatedFileSystem::Node::LosePages(std::mt19937_64& random) {
  const size_t size = Coin(random) ? bytes.size() : synced_bytes.size();
  std::string left = synced_bytes;
  left.resize(size);
  for (const int64_t page : dirty_pages) {
    const auto begin = static_cast<size_t>(page * kSimulatedPage);
    if (Coin(random) || begin >= std::min(size, bytes.size())) continue;
    const size_t length =
        std::min<size_t>({kSimulatedPage, size - begin, bytes.size() - begin});
    left.replace(begin, length, bytes, begin, length);
  }
  bytes = left;
  Synced();
}

void SimulatedFileSystem::Node::LoseEntries(std::mt19937_64& random) {
  if (since_sync.empty()) return;
  const Entries before = since_sync.front();
  since_sync.push_back(entries);
  const Entries then = since_sync[random() % since_sync.size()];
  std::map<std::string, std::string> groups = Groups(renamed);
  std::map<std::string, bool> keeps;  // by group
  std::set<std::string> names;
  for (const auto& [name, node] : before) names.insert(name);
  for (const auto& [name, node] : then) names.insert(name);
  entries.clear();
  for (const std::string& name : names) {
    const std::string& group = groups.emplace(name, name).first->second;
    const bool keep = keeps.emplace(group, Coin(random)).first->second;
    const Entries& source = keep ? then : before;
    const auto found = source.find(name);
    if (found != source.end()) entries.insert(*found);
  }
  Synced();
}

}  // namespace fsdp::checkpoint::testing
