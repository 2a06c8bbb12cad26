#include "checkpoint/pickle/tree_check.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

// What Python writes stays below: a reference of two bytes to a shape, say.
constexpr uint64_t kWeightPerByte = 16;
constexpr uint64_t kFreeWeight = 1024;
// A text weighs one more for each of these.
constexpr uint64_t kTextPerWeight = 16;

class Walk {
 public:
  Walk(const std::vector<Node>& nodes, int max_depth, size_t pickle_bytes)
      : nodes_(nodes),
        max_depth_(max_depth),
        max_weight_(kFreeWeight + kWeightPerByte * pickle_bytes),
        seen_(nodes.size()) {}

  absl::Status Run(NodeId root) {
    Enter(root);
    while (!path_.empty()) {
      Step& top = path_.back();
      if (top.next == Children(top.id)) {
        FSDP_RETURN_IF_ERROR(Leave());
      } else {
        FSDP_RETURN_IF_ERROR(Visit(Child(top.id, top.next++)));
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Step {
    NodeId id;
    size_t next;  // of its children
  };
  struct Seen {
    enum { kNo, kOnPath, kDone } state = kNo;
    int depth = 1;        // of the tree from here down
    uint64_t weight = 0;  // of that tree
  };

  size_t Children(NodeId id) const {
    const Node& node = nodes_[id];
    const bool calls =
        node.kind == NodeKind::kObject || node.kind == NodeKind::kPersistent;
    return node.items.size() + (calls ? 3 : 0);
  }

  NodeId Child(NodeId id, size_t i) const {
    const Node& node = nodes_[id];
    if (i < node.items.size()) return node.items[i];
    const NodeId others[] = {node.global, node.args, node.state};
    return others[i - node.items.size()];
  }

  void Enter(NodeId id) {
    path_.push_back({id, 0});
    seen_[id].state = Seen::kOnPath;
    seen_[id].weight = 1 + nodes_[id].text.size() / kTextPerWeight;
  }

  absl::Status Visit(NodeId child) {
    switch (seen_[child].state) {
      case Seen::kDone:
        return Add(child);
      case Seen::kOnPath:
        return absl::InvalidArgumentError("a value contains itself: refused");
      case Seen::kNo:
        break;
    }
    if (path_.size() >= static_cast<size_t>(max_depth_)) return TooDeep();
    Enter(child);
    return absl::OkStatus();
  }

  absl::Status Leave() {
    const NodeId id = path_.back().id;
    path_.pop_back();
    seen_[id].state = Seen::kDone;
    return path_.empty() ? absl::OkStatus() : Add(id);
  }

  // What is below a finished child to the one that is on top.
  absl::Status Add(NodeId child) {
    Seen& parent = seen_[path_.back().id];
    parent.depth = std::max(parent.depth, seen_[child].depth + 1);
    parent.weight += seen_[child].weight;
    if (parent.depth > max_depth_) return TooDeep();
    if (parent.weight > max_weight_) {
      return absl::InvalidArgumentError(
          "it refers to the same values so often that a few bytes become very "
          "many: refused");
    }
    return absl::OkStatus();
  }

  absl::Status TooDeep() const {
    return absl::InvalidArgumentError(absl::StrCat(
        "values lie more than ", max_depth_, " deep in each other: refused"));
  }

  const std::vector<Node>& nodes_;
  const int max_depth_;
  const uint64_t max_weight_;
  std::vector<Seen> seen_;
  std::vector<Step> path_;
};

}  // namespace

absl::Status CheckTree(const std::vector<Node>& nodes, NodeId root,
                       int max_depth, size_t pickle_bytes) {
  return Walk(nodes, max_depth, pickle_bytes).Run(root);
}

}  // namespace fsdp::checkpoint
