// Scenarios of ranks that share memory: hosts, groups and fences as
// comm/shared_memory makes them, and what their threads do.
#ifndef TESTING_INTERLEAVINGS_RANKS_H_
#define TESTING_INTERLEAVINGS_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/host/shared_host.h"
#include "comm/host/shared_segment.h"
#include "comm/shared_memory/shared_group.h"
#include "testing/interleavings/checker.h"

namespace fsdp::interleavings {

struct Rank {
  int rank = 0;
  std::shared_ptr<comm::SharedHost> host;
  std::shared_ptr<comm::SharedGroup> group;
  std::unique_ptr<comm::Fence> fence;
  std::shared_ptr<comm::SharedSegment> common;
  char* data = nullptr;  // common memory behind the fence's counters
  absl::Time deadline;   // an hour from the beginning

  int world_size() const { return group->world_size(); }
  absl::Status PassFence() {
    fence->Arrive();
    return fence->Wait(deadline);
  }
};

struct RankThread {
  int rank;
  std::function<void(Rank&)> body;
};

// Common memory has `common_bytes`, zero at first. `before` runs when all are
// connected, before there are threads.
struct RanksOptions {
  int world_size = 2;
  int64_t common_bytes = 64;
  std::function<void(std::vector<Rank>&)> before = nullptr;
};

std::unique_ptr<Scenario> MakeRanks(RanksOptions options,
                                    std::vector<RankThread> threads);

// Runs the same on all ranks.
MakeScenario OnAllRanks(const RanksOptions& options,
                        const std::function<void(Rank&)>& body);

// Reports a violation unless the status is ok.
void ExpectOk(const absl::Status& status, const Rank& rank, const char* what);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_RANKS_H_
