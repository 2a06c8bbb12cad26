#include "base/control_groups.h"

#include <fstream>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace fsdp {
namespace {

// In version 2 one hierarchy has all controllers.
bool HasController(absl::string_view list, absl::string_view controller) {
  return absl::c_linear_search(absl::StrSplit(list, ','), controller);
}

// Returns the process's group in the hierarchy of the controller, or "" if
// there is none.
std::string GroupOf(absl::string_view controller, bool is_version_2,
                    const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // "4:cpu,memory:/user/job", "0::/user/job".
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    const bool is_it =
        parts.size() == 3 &&
        (is_version_2 ? parts[1].empty() : HasController(parts[1], controller));
    if (is_it) return parts[2];
  }
  return "";
}

struct Mount {
  std::string directory;
  std::string group;  // whose files are there
};

Mount MountOf(absl::string_view controller, bool is_version_2,
              const std::string& root) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw".
    const std::vector<std::string> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> where = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> what = absl::StrSplit(halves[1], ' ');
    if (where.size() >= 5 && what.size() >= 3 &&
        what[0] == (is_version_2 ? "cgroup2" : "cgroup") &&
        (is_version_2 || HasController(what[2], controller))) {
      return {root + where[4], where[3]};
    }
  }
  return {};
}

}  // namespace

std::vector<ControlGroup> ControlGroups(absl::string_view controller,
                                        const std::string& root) {
  std::vector<ControlGroup> groups;
  for (const bool is_version_2 : {true, false}) {
    const Mount mount = MountOf(controller, is_version_2, root);
    std::string group = GroupOf(controller, is_version_2, root);
    if (mount.directory.empty() || group.empty()) continue;
    // A container may see its own group only, under whatever name.
    if (mount.group != "/") {
      absl::string_view inside = group;
      group = absl::ConsumePrefix(&inside, mount.group) ? std::string(inside)
                                                        : std::string();
    }
    if (absl::StrContains(group, "..")) group.clear();
    for (;;) {
      group.resize(absl::StripSuffix(group, "/").size());
      groups.push_back({mount.directory + group, is_version_2});
      if (group.empty()) break;
      const size_t slash = group.rfind('/');
      group.resize(slash == std::string::npos ? 0 : slash);
    }
  }
  return groups;
}

}  // namespace fsdp
