// Which groups a split of a hierarchical group is made of.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_SPLIT_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_SPLIT_H_

#include <cstdint>

#include "absl/types/span.h"
#include "comm/hierarchical/host_layout.h"

namespace fsdp::comm {

// What a rank passes to Communicator::Split().
struct SplitRequest {
  int64_t color = 0;
  int64_t key = 0;
};

struct SplitPlan {
  enum class Kind {
    kInsideHosts,   // no group leaves its host
    kBetweenHosts,  // every group has one place on all its hosts
    // Every group has hosts of equally many ranks that follow each other, on
    // the same places.
    kHierarchical,
    kNetwork,  // anything else
  };
  Kind kind = Kind::kNetwork;
  // Of this rank where the new group is hierarchical.
  int host = 0;
  int place = 0;
};

// `requests`, by rank. All ranks come to the same kind.
SplitPlan PlanSplit(absl::Span<const SplitRequest> requests,
                    const HostLayout& layout, int rank);

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HIERARCHICAL_SPLIT_H_
