// Is a graph of nodes a tree of a bearable size?
#ifndef CHECKPOINT_PICKLE_TREE_CHECK_H_
#define CHECKPOINT_PICKLE_TREE_CHECK_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/pickle/document.h"

namespace fsdp::checkpoint {

// InvalidArgument for a cycle below `root`, for more than `max_depth` nodes on
// a way down, and where all ways down together are more than a pickle of
// `pickle_bytes` is meant to say.
absl::Status CheckTree(const std::vector<Node>& nodes, NodeId root,
                       int max_depth, size_t pickle_bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_PICKLE_TREE_CHECK_H_
