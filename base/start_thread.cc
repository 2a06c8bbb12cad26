#include "base/start_thread.h"

#include <sys/resource.h>

#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace fsdp {
namespace {

std::string FirstWord(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// Returns the limit of this process's control group, or "" if there is none.
std::string LimitOfControlGroup() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/path", or "4:pids:/path" in version 1.
    const std::vector<std::string> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const bool is_version_2 = fields[0] == "0";
    if (!is_version_2 && fields[1] != "pids") continue;
    const absl::string_view root =
        is_version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/pids";
    // A container sees its own group at the root.
    for (const absl::string_view path :
         {absl::string_view(fields[2]), absl::string_view()}) {
      std::string limit = FirstWord(absl::StrCat(root, path, "/pids.max"));
      if (!limit.empty()) return limit;
    }
  }
  return "";
}

}  // namespace

std::string ThreadLimits() {
  std::vector<std::string> limits;
  rlimit user = {};
  if (getrlimit(RLIMIT_NPROC, &user) == 0) {
    limits.push_back(absl::StrCat("this user may have ",
                                  user.rlim_cur == RLIM_INFINITY
                                      ? "any number of"
                                      : absl::StrCat(user.rlim_cur),
                                  " processes and threads (ulimit -u)"));
  }
  if (const std::string group = LimitOfControlGroup(); !group.empty()) {
    limits.push_back(absl::StrCat("the control group ", group, " (pids.max)"));
  }
  if (const std::string all = FirstWord("/proc/sys/kernel/threads-max");
      !all.empty()) {
    limits.push_back(absl::StrCat("the system ", all, " (kernel.threads-max)"));
  }
  if (rlimit space = {};
      getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    limits.push_back(absl::StrCat("this process ", space.rlim_cur,
                                  " bytes of addresses (ulimit -v)"));
  }
  return absl::StrJoin(limits, ", ");
}

absl::StatusOr<std::thread> StartThread(absl::string_view purpose,
                                        absl::AnyInvocable<void() &&> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& e) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread ", purpose, ": ",
                     e.code().message(), "; ", ThreadLimits()));
  }
}

}  // namespace fsdp
