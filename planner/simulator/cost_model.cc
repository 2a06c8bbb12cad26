#include "planner/simulator/cost_model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::simulator {
namespace {

// A number that has to be positive, or may be 0, too.
struct Number {
  std::string what;
  double value;
  bool may_be_zero = false;
};

absl::Status Check(const std::vector<Number>& numbers) {
  for (const auto& [what, value, may_be_zero] : numbers) {
    if (value > 0 || (may_be_zero && value == 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is ", value,
                     may_be_zero ? ": it cannot be negative"
                                 : ": it has to be positive, or infinite"));
  }
  return absl::OkStatus();
}

absl::Status CheckLevels(const CostOptions& options, int ranks) {
  if (options.levels.empty()) {
    return absl::InvalidArgumentError("the network has no level");
  }
  int64_t capacity = 1;
  for (size_t i = 0; i < options.levels.size(); ++i) {
    const NetworkLevel& level = options.levels[i];
    const std::string name = absl::StrCat("of network level ", i);
    FSDP_RETURN_IF_ERROR(
        Check({{absl::StrCat("the latency ", name), level.latency, true},
               {absl::StrCat("the bandwidth ", name), level.bandwidth},
               {absl::StrCat("the bandwidth of reductions ", name),
                level.reduce_bandwidth, true}}));
    const bool is_last = i + 1 == options.levels.size();
    if (level.members < (is_last ? 0 : 1)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the number of members ", name, " is ", level.members,
          ": it has to be positive, but for the last level, where 0 is any"));
    }
    capacity = level.members == 0 ? ranks
                                  : std::min<int64_t>(capacity * level.members,
                                                      int64_t{1} << 31);
  }
  if (capacity < ranks) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the network has room for ", capacity, " ranks, not for ", ranks,
        ": give its last level more members, or any number"));
  }
  if (options.shared_memory && options.algorithm == Algorithm::kRing) {
    return absl::InvalidArgumentError(
        "in shared memory there is no ring: choose the hierarchical or the "
        "recursive algorithm");
  }
  return absl::OkStatus();
}

double DivideUp(double a, double b) { return std::ceil(a / b); }

}  // namespace

absl::StatusOr<CostModel> CostModel::Create(CostOptions options, int ranks) {
  if (ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the number of ranks is ", ranks, ": at least 1"));
  }
  FSDP_RETURN_IF_ERROR(Check(
      {{"the rate of compute", options.flops_per_second},
       {"the memory bandwidth", options.memory_bandwidth},
       {"the memory bandwidth of a host", options.host_memory_bandwidth, true},
       {"the optimizer's memory bandwidth", options.optimizer_bandwidth, true},
       {"the time of a fence", options.fence_seconds, true},
       {"the number of cores of a host", options.cores, true},
       {"the number of threads of a rank", options.threads}}));
  FSDP_RETURN_IF_ERROR(CheckLevels(options, ranks));
  return CostModel(std::move(options), ranks);
}

CostModel::CostModel(CostOptions options, int ranks)
    : options_(std::move(options)) {
  int64_t below = 1;
  for (const NetworkLevel& level : options_.levels) {
    below_.push_back(static_cast<int>(below));
    below = level.members == 0
                ? ranks
                : std::min<int64_t>(below * level.members, ranks);
  }
  below_.push_back(ranks);
  const int on_host = below_[1];
  stretch_ = options_.cores == 0
                 ? 1
                 : std::max(1.0, on_host * options_.threads / options_.cores);
  const auto shared = [&](double bandwidth) {
    bandwidth /= stretch_;
    const double host = options_.host_memory_bandwidth;
    return host == 0 ? bandwidth : std::min(bandwidth, host / on_host);
  };
  copy_bandwidth_ = shared(options_.memory_bandwidth);
  optimizer_bandwidth_ =
      shared(options_.optimizer_bandwidth == 0 ? options_.memory_bandwidth
                                               : options_.optimizer_bandwidth);
}

int CostModel::RanksOnHost(const Group& group) const {
  return RanksInMember(group, 1);
}

int CostModel::RanksInMember(const Group& group, int level) const {
  if (level == static_cast<int>(options_.levels.size())) return group.size;
  return std::min(group.size, std::max(1, below_[level] / group.stride));
}

double CostModel::ComputeSeconds(const Work& work) const {
  return stretch_ * (work.flops / options_.flops_per_second + work.seconds);
}

double CostModel::CopySeconds(double bytes) const {
  return bytes / copy_bandwidth_;
}

double CostModel::OptimizerSeconds(double bytes) const {
  return bytes / optimizer_bandwidth_;
}

double CostModel::CollectiveSeconds(Collective collective, const Group& group,
                                    int64_t bytes) const {
  if (group.size == 1 || bytes == 0) return 0;
  if (collective != Collective::kAllReduce) {
    const double piece = static_cast<double>(bytes) / group.size;
    return ExchangeSeconds(group, piece,
                           collective == Collective::kReduceScatter);
  }
  const double piece = DivideUp(static_cast<double>(bytes), group.size);
  return ExchangeSeconds(group, piece, /*reduces=*/true) +
         ExchangeSeconds(group, piece, /*reduces=*/false);
}

double CostModel::ExchangeSeconds(const Group& group, double piece,
                                  bool reduces) const {
  double seconds = 0;  // of all levels, one after the other
  double slowest = 0;  // of a message, in one ring over all levels
  const int num_levels = static_cast<int>(options_.levels.size());
  for (int i = 0; i < num_levels; ++i) {
    const NetworkLevel& level = options_.levels[i];
    const int inside = RanksInMember(group, i);
    const int reached = RanksInMember(group, i + 1);
    if (reached == inside) continue;
    if (i == 0 && options_.shared_memory) {
      seconds += options_.fence_seconds;
      // A rank reads everyone's pieces and writes its own sum.
      const int ranks = RanksOnHost(group);
      const double block = piece * group.size / ranks;
      if (reduces) seconds += CopySeconds((ranks + 1) * block);
      continue;
    }
    const double bandwidth = reduces && level.reduce_bandwidth > 0
                                 ? level.reduce_bandwidth
                                 : level.bandwidth;
    const double rings = std::min(group.stride, below_[i]);
    slowest = std::max(slowest, level.latency + rings * piece / bandwidth);
    // A rank sends what it has of ranks in other members of the levels above,
    // too, and all ranks of a member send at once.
    const double block = piece * group.size / reached * below_[i];
    const double members = DivideUp(reached, inside);
    const double messages = options_.algorithm == Algorithm::kRecursive
                                ? std::ceil(std::log2(members))
                                : members - 1;
    seconds += messages * level.latency + (members - 1) * block / bandwidth;
  }
  return options_.algorithm == Algorithm::kRing ? (group.size - 1) * slowest
                                                : seconds;
}

int64_t CostModel::BytesSent(Collective collective, const Group& group,
                             int64_t bytes) const {
  if (group.size == 1) return 0;
  const int64_t piece = (bytes + group.size - 1) / group.size;
  int64_t peers = group.size - 1;
  if (options_.shared_memory) {
    const int here = RanksOnHost(group);
    peers = (group.size + here - 1) / here - 1;
  }
  return (collective == Collective::kAllReduce ? 2 : 1) * piece * peers;
}

}  // namespace fsdp::simulator
