#include "checkpoint/pickle/unpickler.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "checkpoint/pickle/opcodes.h"
#include "checkpoint/pickle/tree_check.h"

namespace fsdp::checkpoint {
namespace {

constexpr NodeId kNoNode = std::numeric_limits<NodeId>::max();
// Always there, so that a byte for one of them makes no node.
enum : NodeId { kNoneNode, kFalseNode, kTrueNode, kEmptyTupleNode };

absl::Status Bad(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("pickle: ", why));
}

// The bytes of a pickle, from the first to the last.
class Input {
 public:
  explicit Input(absl::string_view bytes) : bytes_(bytes) {}

  size_t size() const { return bytes_.size(); }
  size_t at() const { return at_; }

  absl::StatusOr<absl::string_view> Take(uint64_t count) {
    if (count > bytes_.size() - at_) {
      return Bad(absl::StrCat("ends after ", bytes_.size(),
                              " bytes in the midst of a value"));
    }
    const absl::string_view taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }

  // Unsigned, little-endian.
  absl::StatusOr<uint64_t> Integer(int bytes) {
    FSDP_ASSIGN_OR_RETURN(const absl::string_view taken, Take(bytes));
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) {
      value |= uint64_t{static_cast<uint8_t>(taken[i])} << (8 * i);
    }
    return value;
  }

  // With a sign, in two's complement of as many bytes as it says first.
  absl::StatusOr<int64_t> Long(int length_bytes) {
    FSDP_ASSIGN_OR_RETURN(const uint64_t length, Integer(length_bytes));
    if (length > 8) {
      return Bad(
          absl::StrCat("an integer of ", length, " bytes; 64 bits are read"));
    }
    const int bits = static_cast<int>(8 * length);
    FSDP_ASSIGN_OR_RETURN(uint64_t value, Integer(static_cast<int>(length)));
    const bool is_negative = bits > 0 && ((value >> (bits - 1)) & 1) != 0;
    if (is_negative && bits < 64) value |= ~uint64_t{0} << bits;
    return static_cast<int64_t>(value);
  }

  // Big-endian.
  absl::StatusOr<double> Double() {
    FSDP_ASSIGN_OR_RETURN(const uint64_t little, Integer(8));
    const uint64_t value = __builtin_bswap64(little);
    double real = 0;
    std::memcpy(&real, &value, sizeof(value));
    return real;
  }

  absl::StatusOr<absl::string_view> Line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == absl::string_view::npos) return Bad("a line does not end");
    FSDP_ASSIGN_OR_RETURN(const absl::string_view line, Take(end - at_));
    ++at_;
    return line;
  }

 private:
  const absl::string_view bytes_;
  size_t at_ = 0;
};

// Values, and marks between them. Nothing is taken from below the last mark.
class Stack {
 public:
  bool empty() const { return values_.empty() && marks_.empty(); }

  // The values above the last mark.
  size_t Available() const {
    return values_.size() - (marks_.empty() ? 0 : marks_.back());
  }

  absl::Status Push(NodeId id) {
    values_.push_back(id);
    return absl::OkStatus();
  }

  absl::StatusOr<NodeId> Top() const {
    if (Available() == 0) return Bad("takes a value where there is none");
    return values_.back();
  }

  absl::Status Pop(NodeId* id) {
    FSDP_ASSIGN_OR_RETURN(*id, Top());
    values_.pop_back();
    return absl::OkStatus();
  }

  // The topmost `count` of those that are available.
  absl::Span<const NodeId> TopMost(size_t count) const {
    return absl::MakeConstSpan(values_).last(count);
  }

  // No more than are available.
  void Shrink(size_t count) { values_.resize(values_.size() - count); }

  void Mark() { marks_.push_back(values_.size()); }

  // How many values lie above the mark that goes.
  absl::StatusOr<size_t> PopMark() {
    if (marks_.empty()) return Bad("takes a mark where there is none");
    const size_t count = Available();
    marks_.pop_back();
    return count;
  }

 private:
  std::vector<NodeId> values_;
  std::vector<size_t> marks_;  // sizes of the stack, rising
};

// Values by number.
class Memo {
 public:
  // Numbers are below `limit`, the bytes of the pickle: so is its memory.
  explicit Memo(size_t limit) : limit_(limit) {}

  absl::StatusOr<NodeId> Get(uint64_t at) const {
    if (at >= values_.size() || values_[at] == kNoNode) {
      return Bad(absl::StrCat("asks for memo ", at, ", which was not set"));
    }
    return values_[at];
  }

  absl::Status Put(uint64_t at, NodeId id) {
    if (at >= limit_) {
      return Bad(absl::StrCat("sets memo ", at, " in ", limit_, " bytes"));
    }
    if (at >= values_.size()) values_.resize(at + 1, kNoNode);
    if (values_[at] == kNoNode) ++count_;
    values_[at] = id;
    return absl::OkStatus();
  }

  size_t count() const { return count_; }  // that are set

 private:
  const size_t limit_;
  std::vector<NodeId> values_;
  size_t count_ = 0;
};

// Python's machine: what opcodes do to values, by way of the stack and the
// memo. One method for each kind of opcode, which is why it is long.
class Machine {
 public:
  Machine(absl::string_view bytes, const AllowList& allowed)
      : input_(bytes), allowed_(allowed), nodes_(4), memo_(bytes.size()) {
    nodes_[kFalseNode].kind = NodeKind::kBool;
    nodes_[kTrueNode].kind = NodeKind::kBool;
    nodes_[kTrueNode].integer = 1;
    nodes_[kEmptyTupleNode].kind = NodeKind::kTuple;
  }

  // The root.
  absl::StatusOr<NodeId> Run() {
    while (true) {
      FSDP_ASSIGN_OR_RETURN(const uint64_t op, input_.Integer(1));
      if (op == pickle_op::kStop) break;
      FSDP_RETURN_IF_ERROR(Scalar(static_cast<uint8_t>(op)));
      if (nodes_.size() >= kNoNode) return Bad("too many values");
    }
    NodeId root = kNoneNode;
    FSDP_RETURN_IF_ERROR(stack_.Pop(&root));
    if (!stack_.empty()) return Bad("ends with values left over");
    return root;
  }

  std::vector<Node> TakeNodes() { return std::move(nodes_); }

 private:
  absl::Status Scalar(uint8_t op) {
    switch (op) {
      case pickle_op::kNone:
        return stack_.Push(kNoneNode);
      case pickle_op::kNewTrue:
        return stack_.Push(kTrueNode);
      case pickle_op::kNewFalse:
        return stack_.Push(kFalseNode);
      case pickle_op::kBinInt1:
        return PushInt(1);
      case pickle_op::kBinInt2:
        return PushInt(2);
      case pickle_op::kBinInt:
        return PushInt(4);
      case pickle_op::kLong1:
        return PushLong(1);
      case pickle_op::kLong4:
        return PushLong(4);
      case pickle_op::kBinFloat:
        return PushFloat();
      case pickle_op::kShortBinString:
      case pickle_op::kShortBinUnicode:
        return PushText(NodeKind::kString, 1);
      case pickle_op::kBinString:
      case pickle_op::kBinUnicode:
        return PushText(NodeKind::kString, 4);
      case pickle_op::kBinUnicode8:
        return PushText(NodeKind::kString, 8);
      case pickle_op::kShortBinBytes:
        return PushText(NodeKind::kBytes, 1);
      case pickle_op::kBinBytes:
        return PushText(NodeKind::kBytes, 4);
      case pickle_op::kBinBytes8:
        return PushText(NodeKind::kBytes, 8);
      default:
        return Container(op);
    }
  }

  absl::Status Container(uint8_t op) {
    switch (op) {
      case pickle_op::kMark:
        stack_.Mark();
        return absl::OkStatus();
      case pickle_op::kEmptyTuple:
        return stack_.Push(kEmptyTupleNode);
      case pickle_op::kTuple1:
        return Collect(NodeKind::kTuple, 1);
      case pickle_op::kTuple2:
        return Collect(NodeKind::kTuple, 2);
      case pickle_op::kTuple3:
        return Collect(NodeKind::kTuple, 3);
      case pickle_op::kTuple:
        return CollectToMark(NodeKind::kTuple);
      case pickle_op::kEmptyList:
        return Collect(NodeKind::kList, 0);
      case pickle_op::kList:
        return CollectToMark(NodeKind::kList);
      case pickle_op::kEmptyDict:
        return Collect(NodeKind::kDict, 0);
      case pickle_op::kDict:
        return CollectToMark(NodeKind::kDict);
      case pickle_op::kAppend:
        return Extend(1, /*is_list=*/true);
      case pickle_op::kSetItem:
        return Extend(2, /*is_list=*/false);
      case pickle_op::kAppends:
      case pickle_op::kSetItems: {
        FSDP_ASSIGN_OR_RETURN(const size_t count, stack_.PopMark());
        return Extend(count, op == pickle_op::kAppends);
      }
      default:
        return Recall(op);
    }
  }

  absl::Status Recall(uint8_t op) {
    switch (op) {
      case pickle_op::kPop:
      case pickle_op::kPopMark:
        return Drop(op == pickle_op::kPopMark);
      case pickle_op::kDup: {
        FSDP_ASSIGN_OR_RETURN(const NodeId top, stack_.Top());
        return stack_.Push(top);
      }
      case pickle_op::kBinGet:
        return Get(1);
      case pickle_op::kLongBinGet:
        return Get(4);
      case pickle_op::kBinPut:
      case pickle_op::kLongBinPut: {
        FSDP_ASSIGN_OR_RETURN(const uint64_t at,
                              input_.Integer(op == pickle_op::kBinPut ? 1 : 4));
        return Put(at);
      }
      case pickle_op::kMemoize:
        return Put(memo_.count());
      default:
        return Call(op);
    }
  }

  absl::Status Call(uint8_t op) {
    switch (op) {
      case pickle_op::kProto: {
        FSDP_ASSIGN_OR_RETURN(const uint64_t protocol, input_.Integer(1));
        if (protocol <= 5) return absl::OkStatus();
        return Bad(absl::StrCat("protocol ", protocol, "; 2 to 5 are read"));
      }
      case pickle_op::kFrame:
        // Says how much to read at once; the bytes are here already.
        return input_.Integer(8).status();
      case pickle_op::kGlobal:
        return GlobalOfLines();
      case pickle_op::kStackGlobal:
        return GlobalOfStack();
      case pickle_op::kReduce:
      case pickle_op::kNewObj:
        return MakeObject();
      case pickle_op::kBuild:
        return Build();
      case pickle_op::kBinPersId: {
        Node node;
        node.kind = NodeKind::kPersistent;
        FSDP_RETURN_IF_ERROR(stack_.Pop(&node.args));
        return PushNode(std::move(node));
      }
      default:
        return Bad(absl::StrCat("opcode 0x", absl::Hex(op, absl::kZeroPad2),
                                " at byte ", input_.at() - 1,
                                " is not what a checkpoint needs: refused"));
    }
  }

  absl::Status PushNode(Node node) {
    nodes_.push_back(std::move(node));
    return stack_.Push(static_cast<NodeId>(nodes_.size() - 1));
  }

  absl::Status PushInt(int bytes) {
    FSDP_ASSIGN_OR_RETURN(const uint64_t value, input_.Integer(bytes));
    // Only the one of four bytes has a sign.
    return PushInt64(bytes == 4 ? static_cast<int32_t>(value)
                                : static_cast<int64_t>(value));
  }

  absl::Status PushLong(int length_bytes) {
    FSDP_ASSIGN_OR_RETURN(const int64_t value, input_.Long(length_bytes));
    return PushInt64(value);
  }

  absl::Status PushInt64(int64_t value) {
    Node node;
    node.kind = NodeKind::kInt;
    node.integer = value;
    return PushNode(std::move(node));
  }

  absl::Status PushFloat() {
    Node node;
    node.kind = NodeKind::kDouble;
    FSDP_ASSIGN_OR_RETURN(node.real, input_.Double());
    return PushNode(std::move(node));
  }

  absl::Status PushText(NodeKind kind, int length_bytes) {
    FSDP_ASSIGN_OR_RETURN(const uint64_t length, input_.Integer(length_bytes));
    Node node;
    node.kind = kind;
    FSDP_ASSIGN_OR_RETURN(node.text, input_.Take(length));
    return PushNode(std::move(node));
  }

  // Of the topmost `count` values.
  absl::Status Collect(NodeKind kind, size_t count) {
    if (stack_.Available() < count) {
      return Bad("collects more values than there are");
    }
    if (kind == NodeKind::kDict && count % 2 != 0) {
      return Bad("a dict has a key without a value");
    }
    Node node;
    node.kind = kind;
    const absl::Span<const NodeId> items = stack_.TopMost(count);
    node.items.assign(items.begin(), items.end());
    stack_.Shrink(count);
    return PushNode(std::move(node));
  }

  absl::Status CollectToMark(NodeKind kind) {
    FSDP_ASSIGN_OR_RETURN(const size_t count, stack_.PopMark());
    return Collect(kind, count);
  }

  // The list or mapping below the topmost `count` values takes them.
  absl::Status Extend(size_t count, bool is_list) {
    if (stack_.Available() < count + 1) return Bad("adds to what is not there");
    const absl::Span<const NodeId> top = stack_.TopMost(count + 1);
    Node& target = nodes_[top.front()];
    const bool fits = is_list ? target.kind == NodeKind::kList
                              : target.kind == NodeKind::kDict ||
                                    target.kind == NodeKind::kObject;
    if (!fits) return Bad("adds items to what takes none");
    if (!is_list && count % 2 != 0) {
      return Bad("a dict has a key without a value");
    }
    target.items.insert(target.items.end(), top.begin() + 1, top.end());
    stack_.Shrink(count);
    return absl::OkStatus();
  }

  absl::Status Get(int bytes) {
    FSDP_ASSIGN_OR_RETURN(const uint64_t at, input_.Integer(bytes));
    FSDP_ASSIGN_OR_RETURN(const NodeId id, memo_.Get(at));
    return stack_.Push(id);
  }

  absl::Status Put(uint64_t at) {
    FSDP_ASSIGN_OR_RETURN(const NodeId top, stack_.Top());
    return memo_.Put(at, top);
  }

  absl::Status Drop(bool to_mark) {
    size_t count = 1;
    if (to_mark) {
      FSDP_ASSIGN_OR_RETURN(count, stack_.PopMark());
    }
    if (stack_.Available() < count) {
      return Bad("drops a value where there is none");
    }
    stack_.Shrink(count);
    return absl::OkStatus();
  }

  absl::Status PushGlobal(absl::string_view module, absl::string_view name) {
    const std::string whole = absl::StrCat(module, ".", name);
    const std::optional<absl::string_view> known = allowed_.Find(whole);
    if (!known.has_value()) {
      constexpr size_t kShown = 200;
      return Bad(absl::StrCat(
          absl::CHexEscape(absl::string_view(whole).substr(0, kShown)),
          " is not what a checkpoint needs: refused; nothing was executed"));
    }
    Node node;
    node.kind = NodeKind::kGlobal;
    node.text = *known;
    return PushNode(std::move(node));
  }

  absl::Status GlobalOfLines() {
    FSDP_ASSIGN_OR_RETURN(const absl::string_view module, input_.Line());
    FSDP_ASSIGN_OR_RETURN(const absl::string_view name, input_.Line());
    return PushGlobal(module, name);
  }

  absl::Status GlobalOfStack() {
    NodeId name = kNoneNode;
    NodeId module = kNoneNode;
    FSDP_RETURN_IF_ERROR(stack_.Pop(&name));
    FSDP_RETURN_IF_ERROR(stack_.Pop(&module));
    if (nodes_[name].kind != NodeKind::kString ||
        nodes_[module].kind != NodeKind::kString) {
      return Bad("a global whose name is no text");
    }
    return PushGlobal(nodes_[module].text, nodes_[name].text);
  }

  absl::Status MakeObject() {
    Node node;
    node.kind = NodeKind::kObject;
    FSDP_RETURN_IF_ERROR(stack_.Pop(&node.args));
    FSDP_RETURN_IF_ERROR(stack_.Pop(&node.global));
    if (nodes_[node.args].kind != NodeKind::kTuple ||
        nodes_[node.global].kind != NodeKind::kGlobal) {
      return Bad("calls what is no name, or with what are no arguments");
    }
    return PushNode(std::move(node));
  }

  absl::Status Build() {
    NodeId state = kNoneNode;
    FSDP_RETURN_IF_ERROR(stack_.Pop(&state));
    FSDP_ASSIGN_OR_RETURN(const NodeId top, stack_.Top());
    Node& target = nodes_[top];
    if (target.kind != NodeKind::kObject || target.state != kNoneNode) {
      return Bad("gives a state to what takes none");
    }
    target.state = state;
    return absl::OkStatus();
  }

  Input input_;
  const AllowList& allowed_;
  std::vector<Node> nodes_;
  Stack stack_;
  Memo memo_;
};

}  // namespace

absl::StatusOr<Document> Unpickle(std::string bytes, const AllowList& allowed) {
  auto owned = std::make_unique<const std::string>(std::move(bytes));
  Machine machine(*owned, allowed);
  FSDP_ASSIGN_OR_RETURN(const NodeId root, machine.Run());
  std::vector<Node> nodes = machine.TakeNodes();
  const absl::Status check =
      CheckTree(nodes, root, kMaxPickleDepth, owned->size());
  if (!check.ok()) return Bad(check.message());
  return Document(std::move(owned), std::move(nodes), root);
}

}  // namespace fsdp::checkpoint
