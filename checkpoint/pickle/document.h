// What a pickle says, as a plain tree of values.
#ifndef CHECKPOINT_PICKLE_DOCUMENT_H_
#define CHECKPOINT_PICKLE_DOCUMENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// Of a node in its document.
using NodeId = uint32_t;

enum class NodeKind : uint8_t {
  kNone,
  kBool,
  kInt,
  kDouble,
  kString,
  kBytes,
  kTuple,
  kList,
  kDict,
  kGlobal,      // a name that the allow-list has
  kObject,      // what a global was called with; never called
  kPersistent,  // persistent_load() of one value
};

struct Node {
  NodeKind kind = NodeKind::kNone;
  int64_t integer = 0;     // kInt; kBool: 0 or 1
  double real = 0;         // kDouble
  absl::string_view text;  // kString, kBytes; kGlobal: "torch.Size"
  // kTuple, kList: the items; kDict, kObject: a key, its value, ...
  std::vector<NodeId> items;
  NodeId global = 0;  // kObject: what is called
  NodeId args = 0;    // kObject: its arguments; kPersistent: the id
  NodeId state = 0;   // kObject: of BUILD; the node of None without
};

// Values that the pickle refers to several times are one node: no cycles, and
// as a tree it is of a size in proportion to the pickle. Its texts are views of
// bytes that it owns. Moves; thread-safe once made.
class Document {
 public:
  Document(std::unique_ptr<const std::string> bytes, std::vector<Node> nodes,
           NodeId root)
      : bytes_(std::move(bytes)), nodes_(std::move(nodes)), root_(root) {}

  const Node& root() const { return nodes_[root_]; }
  const Node& operator[](NodeId id) const { return nodes_[id]; }

 private:
  std::unique_ptr<const std::string> bytes_;  // stays where it is when moved
  std::vector<Node> nodes_;
  NodeId root_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_PICKLE_DOCUMENT_H_
