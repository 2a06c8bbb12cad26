// The memory of a simulated disk, and the part of it that survives.
#ifndef CHECKPOINT_FILES_TESTING_SIMULATED_NODE_H_
#define CHECKPOINT_FILES_TESTING_SIMULATED_NODE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/files/testing/simulated_file_system.h"

namespace fsdp::checkpoint::testing {

inline constexpr int64_t kSimulatedPage = 4096;

using Entries =
    std::map<std::string, std::shared_ptr<SimulatedFileSystem::Node>>;

// A file or a folder: as programs see it, and as it is on the disk for sure.
struct SimulatedFileSystem::Node {
  bool is_folder = false;

  std::string bytes;
  std::string synced_bytes;
  std::set<int64_t> dirty_pages;  // since the last Sync()

  Entries entries;
  std::vector<Entries> since_sync;  // before each change; front(): synced
  std::vector<std::pair<std::string, std::string>> renamed;  // since sync

  // Is called before a change of `entries`.
  void Remember() { since_sync.push_back(entries); }
  void Synced();
  // Returns the bytes of all files in it.
  int64_t Bytes() const;
  // Makes it and everything below it what a loss of power leaves.
  void LosePower(std::mt19937_64& random);

 private:
  void LosePages(std::mt19937_64& random);
  void LoseEntries(std::mt19937_64& random);
};

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_SIMULATED_NODE_H_
