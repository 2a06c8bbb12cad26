#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {
namespace {

absl::Status Check(const CostOptions& options, int ranks) {
  if (ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the number of ranks is ", ranks, ": at least 1"));
  }
  const struct {
    const char* what;
    double value;
    bool may_be_zero = false;
  } numbers[] = {
      {"the rate of compute", options.flops_per_second},
      {"the memory bandwidth", options.memory_bandwidth},
      {"the number of ranks per host",
       static_cast<double>(options.ranks_per_host), true},
      {"the latency on a host", options.host.latency, true},
      {"the bandwidth on a host", options.host.bandwidth},
      {"the bandwidth of reductions on a host", options.host.reduce_bandwidth,
       true},
      {"the latency between hosts", options.network.latency, true},
      // One host needs no network.
      {"the bandwidth between hosts", options.network.bandwidth,
       options.ranks_per_host == 0 || options.ranks_per_host >= ranks},
      {"the bandwidth of reductions between hosts",
       options.network.reduce_bandwidth, true},
      {"the time of a fence", options.fence_seconds, true}};
  for (const auto& [what, value, may_be_zero] : numbers) {
    if (value > 0 || (may_be_zero && value == 0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is ", value,
                     may_be_zero ? ": it cannot be negative"
                                 : ": it has to be positive, or infinite"));
  }
  return absl::OkStatus();
}

double MessageSeconds(const Link& link, double bytes, bool reduces) {
  const bool is_slower = reduces && link.reduce_bandwidth > 0;
  return link.latency +
         bytes / (is_slower ? link.reduce_bandwidth : link.bandwidth);
}

}  // namespace

absl::StatusOr<CostModel> CostModel::Create(const CostOptions& options,
                                            int ranks) {
  FSDP_RETURN_IF_ERROR(Check(options, ranks));
  CostModel model(options);
  int& on_host = model.options_.ranks_per_host;
  on_host = on_host == 0 ? ranks : std::min(on_host, ranks);
  return model;
}

int CostModel::RanksOnHost(const Group& group) const {
  return std::min(group.size,
                  std::max(1, options_.ranks_per_host / group.stride));
}

int CostModel::HostsOf(const Group& group) const {
  const int on_host = RanksOnHost(group);
  return (group.size + on_host - 1) / on_host;
}

double CostModel::ComputeSeconds(const Work& work) const {
  return work.flops / options_.flops_per_second + work.seconds;
}

double CostModel::MemorySeconds(double bytes) const {
  return bytes / options_.memory_bandwidth;
}

double CostModel::CollectiveSeconds(Collective collective, const Group& group,
                                    int64_t bytes) const {
  if (group.size == 1 || bytes == 0) return 0;
  const double piece = static_cast<double>(bytes) / group.size;
  if (collective != Collective::kAllReduce) {
    return ExchangeSeconds(group, piece,
                           collective == Collective::kReduceScatter);
  }
  return ExchangeSeconds(group, std::ceil(piece), /*reduces=*/true) +
         ExchangeSeconds(group, std::ceil(piece), /*reduces=*/false);
}

double CostModel::ExchangeSeconds(const Group& group, double piece,
                                  bool reduces) const {
  double seconds = 0;
  if (const int others = HostsOf(group) - 1; others > 0) {
    // All ranks of a host send at once, of this group and of others.
    const double bytes = piece * options_.ranks_per_host;
    seconds = others * MessageSeconds(options_.network, bytes, reduces);
  }
  const int on_host = RanksOnHost(group);
  if (on_host == 1) return seconds;
  // A rank passes on what it has of ranks on other hosts, too.
  const double block = piece * group.size / on_host;
  if (!options_.shared_memory) {
    return seconds +
           (on_host - 1) * MessageSeconds(options_.host, block, reduces);
  }
  seconds += options_.fence_seconds;
  // A rank reads everyone's pieces and writes its own sum.
  if (reduces) seconds += MemorySeconds((on_host + 1) * block);
  return seconds;
}

int64_t CostModel::BytesSent(Collective collective, const Group& group,
                             int64_t bytes) const {
  const int64_t piece = (bytes + group.size - 1) / group.size;
  const int64_t peers =
      (options_.shared_memory ? HostsOf(group) : group.size) - 1;
  return (collective == Collective::kAllReduce ? 2 : 1) * piece * peers;
}

}  // namespace fsdp::simulator
