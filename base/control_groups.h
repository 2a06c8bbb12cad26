// Finds the control groups of this process, of version 1 and of version 2.
#ifndef BASE_CONTROL_GROUPS_H_
#define BASE_CONTROL_GROUPS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp {

struct ControlGroup {
  std::string folder;  // of its files; it may be missing
  bool is_version_2 = false;
};

// Returns the group of `controller` ("memory") that the process is in and all
// groups around it that it can see, the innermost first. /proc and what is
// mounted are looked for under `root`.
std::vector<ControlGroup> ControlGroups(absl::string_view controller,
                                        const std::string& root = "");

}  // namespace fsdp

#endif  // BASE_CONTROL_GROUPS_H_
