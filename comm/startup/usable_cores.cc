#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

int CoresOfAffinity() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // The host has more cores than the set has room for.
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  return std::max(1, CPU_COUNT(&cores));
}

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

double Quota(absl::string_view quota, absl::string_view period) {
  double time = 0;
  double of = 0;
  const bool is_limit = absl::SimpleAtod(quota, &time) &&
                        absl::SimpleAtod(period, &of) && time > 0 && of > 0;
  return is_limit ? time / of : kNoQuota;
}

// Returns the least quota of the group at this path and of all above it.
double QuotaOf(const std::string& mount, std::string group, bool is_v2) {
  double least = kNoQuota;
  while (true) {
    const std::string folder = absl::StrCat(mount, group, "/");
    if (is_v2) {
      const std::vector<std::string> parts =
          absl::StrSplit(FirstLine(folder + "cpu.max"), ' ');
      if (parts.size() == 2) least = std::min(least, Quota(parts[0], parts[1]));
    } else {
      least = std::min(least, Quota(FirstLine(folder + "cpu.cfs_quota_us"),
                                    FirstLine(folder + "cpu.cfs_period_us")));
    }
    if (group.empty()) return least;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

int UsableCores(const std::string& root) {
  double cores = CoresOfAffinity();
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/system.slice/job" of version 2, "4:cpu,cpuacct:/job" of version 1.
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    std::string group = parts[2];
    while (!group.empty() && group.back() == '/') group.pop_back();
    if (!group.empty() && group.front() != '/') continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    const bool has_cpu = absl::c_linear_search(controllers, "cpu");
    if (parts[1].empty()) {
      cores = std::min(cores,
                       QuotaOf(root + "/sys/fs/cgroup", group, /*is_v2=*/true));
    } else if (has_cpu) {
      cores = std::min(
          cores, QuotaOf(root + "/sys/fs/cgroup/cpu", group, /*is_v2=*/false));
    }
  }
  return std::max(1, static_cast<int>(std::ceil(cores)));
}

int ThreadsPerRank(int ranks_on_host) {
  const char* const variable = std::getenv("OMP_NUM_THREADS");
  int threads = 0;
  if (variable != nullptr && absl::SimpleAtoi(variable, &threads) &&
      threads > 0) {
    return threads;
  }
  return std::max(1, UsableCores() / std::max(1, ranks_on_host));
}

}  // namespace fsdp::comm
