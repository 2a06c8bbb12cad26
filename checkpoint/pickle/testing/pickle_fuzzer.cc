#include "checkpoint/pickle/testing/pickle_fuzzer.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "base/check.h"
#include "checkpoint/pickle/allow_list.h"
#include "checkpoint/pickle/document.h"
#include "checkpoint/pickle/unpickler.h"

namespace fsdp::checkpoint {
namespace {

// Every way down, as those do who read documents. Returns how many nodes.
size_t Count(const Document& document, const Node& node, int depth) {
  FSDP_CHECK(depth <= kMaxPickleDepth);
  size_t count = 1;
  for (const NodeId item : node.items) {
    count += Count(document, document[item], depth + 1);
  }
  if (node.kind == NodeKind::kObject) {
    FSDP_CHECK(document[node.global].kind == NodeKind::kGlobal);
    FSDP_CHECK(node.items.size() % 2 == 0);
    count += Count(document, document[node.args], depth + 1);
    count += Count(document, document[node.state], depth + 1);
  }
  if (node.kind == NodeKind::kPersistent) {
    count += Count(document, document[node.args], depth + 1);
  }
  return count;
}

}  // namespace
}  // namespace fsdp::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fsdp::checkpoint::AllowList;
  using fsdp::checkpoint::Document;
  static const auto* const allowed =
      new AllowList({"collections.OrderedDict", "torch.Size", "torch.float32",
                     "torch._utils._rebuild_tensor_v2", "torch.FloatStorage"});
  const absl::StatusOr<Document> document = fsdp::checkpoint::Unpickle(
      std::string(reinterpret_cast<const char*>(data), size), *allowed);
  if (document.ok()) {
    FSDP_CHECK(fsdp::checkpoint::Count(*document, document->root(), 1) <=
               1024 + 16 * size);
  }
  return 0;
}
