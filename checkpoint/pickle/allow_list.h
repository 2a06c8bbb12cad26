// Which of Python's names a pickle may mention.
#ifndef CHECKPOINT_PICKLE_ALLOW_LIST_H_
#define CHECKPOINT_PICKLE_ALLOW_LIST_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// Immutable, thread-safe. Outlives the documents that were read with it, whose
// globals are views of its names.
class AllowList {
 public:
  // "torch.Size": the module, a dot, the name in it.
  explicit AllowList(const std::vector<std::string>& names)
      : names_(names.begin(), names.end()) {}

  // The list's own copy of the name.
  std::optional<absl::string_view> Find(absl::string_view name) const {
    const auto found = names_.find(name);
    if (found == names_.end()) return std::nullopt;
    return *found;
  }

 private:
  absl::flat_hash_set<std::string> names_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_PICKLE_ALLOW_LIST_H_
