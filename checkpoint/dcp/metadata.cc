#include "checkpoint/dcp/metadata.h"

#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

std::string DcpName(const DcpPath& path) {
  std::string name;
  for (const auto& key : path) {
    const absl::string_view dot = name.empty() ? "" : ".";
    if (const auto* const text = std::get_if<std::string>(&key)) {
      absl::StrAppend(&name, dot, *text);
    } else {
      absl::StrAppend(&name, dot, std::get<int64_t>(key));
    }
  }
  return name;
}

}  // namespace fsdp::checkpoint
