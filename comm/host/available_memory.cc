#include "comm/host/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace fsdp::comm {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The files of one version of control groups.
struct Version {
  const char* file_system;  // as mounts call it
  const char* controller;   // in the list of a hierarchy; "": there is no list
  const char* limit;
  const char* used;
  const char* cached;  // in memory.stat, with that of the groups inside
};
constexpr Version kVersions[] = {
    {"cgroup2", "", "memory.max", "memory.current", "inactive_file"},
    {"cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_inactive_file"},
};

// Returns the number in a file; kUnlimited for "max" or no such file.
int64_t NumberIn(const std::string& path) {
  int64_t number = 0;
  return std::ifstream(path) >> number ? number : kUnlimited;
}

// Returns the number after `key` at the beginning of a line, or `otherwise`.
int64_t NumberAfter(absl::string_view key, const std::string& path,
                    int64_t otherwise) {
  std::ifstream file(path);
  std::string found;
  int64_t number = 0;
  std::string rest;
  while (file >> found >> number) {
    if (found == key) return number;
    std::getline(file, rest);
  }
  return otherwise;
}

bool HasController(absl::string_view list, absl::string_view controller) {
  return controller.empty() ||
         absl::c_linear_search(absl::StrSplit(list, ','), controller);
}

// Returns the process's group in the hierarchy of `version`, or "" if none.
std::string GroupOf(const Version& version, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // "4:cpu,memory:/user/job", "0::/user/job".
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    const bool is_it = parts.size() == 3 &&
                       (*version.controller == '\0') == parts[1].empty() &&
                       HasController(parts[1], version.controller);
    if (is_it) return parts[2];
  }
  return "";
}

struct Mount {
  std::string directory;
  std::string group;  // whose files are there
};

Mount MountOf(const Version& version, const std::string& root) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw".
    const std::vector<std::string> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> where = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> what = absl::StrSplit(halves[1], ' ');
    if (where.size() >= 5 && what.size() >= 3 &&
        what[0] == version.file_system &&
        HasController(what[2], version.controller)) {
      return {root + where[4], where[3]};
    }
  }
  return {};
}

int64_t OfGroup(const Version& version, const std::string& directory) {
  const int64_t limit = NumberIn(absl::StrCat(directory, "/", version.limit));
  const int64_t used = NumberIn(absl::StrCat(directory, "/", version.used));
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  const int64_t cached =
      NumberAfter(version.cached, directory + "/memory.stat", /*otherwise=*/0);
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cached));
}

// Returns the least that the process's group and the groups around it leave.
int64_t OfGroups(const Version& version, const std::string& root) {
  const Mount mount = MountOf(version, root);
  std::string group = GroupOf(version, root);
  if (mount.directory.empty() || group.empty()) return kUnlimited;
  // A container may see its own group only, under whatever name.
  if (mount.group != "/") {
    absl::string_view inside = group;
    group = absl::ConsumePrefix(&inside, mount.group) ? std::string(inside)
                                                      : std::string();
  }
  if (absl::StrContains(group, "..")) group.clear();
  int64_t least = kUnlimited;
  for (;;) {
    group.resize(absl::StripSuffix(group, "/").size());
    least = std::min(least, OfGroup(version, mount.directory + group));
    if (group.empty()) return least;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

}  // namespace

int64_t AvailableMemory(const std::string& root) {
  const int64_t kilobytes =
      NumberAfter("MemAvailable:", root + "/proc/meminfo", kUnlimited / 1024);
  int64_t available =
      kilobytes == kUnlimited / 1024 ? kUnlimited : kilobytes * 1024;
  for (const Version& version : kVersions) {
    available = std::min(available, OfGroups(version, root));
  }
  return available;
}

}  // namespace fsdp::comm
