#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "offload/file_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "planner/choose/choose_options.h"

namespace fsdp {
absl::Status StepCosts::Validate() const {
  const std::pair<const char*, double> rates[] = {
      {"memory_bandwidth", memory_bandwidth},
      {"gather_bandwidth", gather_bandwidth},
      {"reduce_bandwidth", reduce_bandwidth},
      {"host_bandwidth", host_bandwidth},
      {"ssd_bandwidth", ssd_bandwidth}};
  for (const auto& [name, rate] : rates) {
    if (rate > 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("StepCosts::", name, " is ", rate,
                     ": it has to be positive, or infinite"));
  }
  if (latency >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "StepCosts::latency is ", latency, ": it cannot be negative"));
}

std::string ToText(const StepCosts& costs) {
  return absl::StrFormat(
      "%.17g %.17g %.17g %.17g %.17g %.17g %d", costs.memory_bandwidth,
      costs.latency, costs.gather_bandwidth, costs.reduce_bandwidth,
      costs.host_bandwidth, costs.ssd_bandwidth, costs.overlaps ? 1 : 0);
}

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr char kLabel[] = "measuring what collectives cost";
constexpr int kRepetitions = 4;

// Messages are measured at the size of a unit, between these two.
constexpr int64_t kLeastBytes = int64_t{64} << 10;
constexpr int64_t kMostBytes = int64_t{32} << 20;

class Measurement {
 public:
  Measurement(comm::Communicator& ranks, c10::Device device, int64_t bytes,
              absl::Duration timeout)
      : ranks_(ranks),
        device_(device),
        bytes_(std::clamp(bytes, kLeastBytes, kMostBytes)),
        timeout_(timeout) {}

  // Both throw.
  void MeasureMemory(StepCosts& costs) {
    const auto options = at::TensorOptions(at::kByte).device(device_);
    // Ones are written, while pages of zeros might not exist yet.
    const at::Tensor from = at::ones({kMostBytes}, options);
    const at::Tensor to = at::ones({kMostBytes}, options);
    costs.memory_bandwidth = 2.0 * kMostBytes / Least([&] { to.copy_(from); });
    costs.host_bandwidth = kInfinity;
    if (device_.is_cpu()) return;
    // Page-locked, as OffloadOptions::lock_pages has it.
    const at::Tensor host = at::ones(
        {kMostBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    costs.host_bandwidth = 1.0 * kMostBytes / Least([&] { host.copy_(from); });
  }

  void MeasureCollectives(StepCosts& costs) {
    costs.latency = 0;
    costs.gather_bandwidth = costs.reduce_bandwidth = kInfinity;
    const int ranks = ranks_.world_size();
    if (ranks == 1) return;
    const int64_t shard = bytes_ / ranks / kElement / 4 * 4;
    const at::Tensor whole =
        ValueOrThrow(ranks_.AllocateSymmetric(ranks * shard * kElement))
            .to(device_)
            .view(at::kFloat);
    whole.fill_(1);
    const at::Tensor out = at::ones({shard}, whole.options());
    const auto gather = [&](int64_t numel) {
      const at::Tensor all = whole.narrow(0, 0, numel * ranks);
      return ranks_.AllGather(all, all.narrow(0, ranks_.rank() * numel, numel),
                              kLabel);
    };
    costs.latency = Least([&] { Wait(gather(4)); });
    const double gathering = Least([&] { Wait(gather(shard)); });
    const double reducing = Least([&] {
      Wait(ranks_.ReduceScatter(out, whole, comm::ReduceOp::kSum, kLabel));
    });
    const auto sent = static_cast<double>(shard * kElement * (ranks - 1));
    const auto bandwidth = [&](double seconds) {
      return sent / std::max(1e-9, seconds - costs.latency);
    };
    costs.gather_bandwidth = bandwidth(gathering);
    costs.reduce_bandwidth = bandwidth(reducing);
    costs.overlaps = !ranks_.HasCommonMemory() &&
                     RunsBeside([&] { return gather(shard); }, gathering);
  }

  // Measures on this rank alone.
  absl::Status MeasureSsd(const std::string& directory, StepCosts& costs) {
    costs.ssd_bandwidth = kInfinity;
    if (directory.empty()) return absl::OkStatus();
    offload::FileStoreOptions options;
    options.directory = directory;
    options.capacity = kMostBytes;
    FSDP_ASSIGN_OR_RETURN(const auto store, offload::FileStore::Make(options));
    FSDP_ASSIGN_OR_RETURN(const auto memory,
                          offload::PageMemory::Allocate(
                              offload::PageAllocator::System(), kMostBytes));
    std::fill_n(memory.data(), kMostBytes, 1);
    constexpr char kRegion[] = "measuring the SSD";
    FSDP_RETURN_IF_ERROR(store->Create(kRegion, kMostBytes));
    const absl::Time begin = absl::Now();
    FSDP_ASSIGN_OR_RETURN(
        const auto write,
        store->Write(kRegion, 0,
                     absl::MakeConstSpan(memory.data(), kMostBytes)));
    FSDP_RETURN_IF_ERROR(write->Wait(begin + timeout_));
    FSDP_ASSIGN_OR_RETURN(
        const auto read,
        store->Read(kRegion, 0, absl::MakeSpan(memory.data(), kMostBytes)));
    FSDP_RETURN_IF_ERROR(read->Wait(begin + timeout_));
    costs.ssd_bandwidth =
        2.0 * kMostBytes / absl::ToDoubleSeconds(absl::Now() - begin);
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kElement = sizeof(float);
  using Started = absl::StatusOr<std::unique_ptr<comm::Work>>;

  void Wait(Started work) const {
    ThrowIfError(ValueOrThrow(std::move(work))->Wait(absl::Now() + timeout_));
  }

  double Seconds(const std::function<void()>& run) const {
    const absl::Time begin = absl::Now();
    run();
    Synchronize(device_);
    return std::max(1e-9, absl::ToDoubleSeconds(absl::Now() - begin));
  }
  // Returns the least seconds of some runs, after one that warms up.
  double Least(const std::function<void()>& run) const {
    double least = kInfinity;
    run();
    for (int i = 0; i < kRepetitions; ++i)
      least = std::min(least, Seconds(run));
    return least;
  }

  // Returns whether what takes `seconds` alone takes less than 1.5 times as
  // long beside as much compute.
  bool RunsBeside(const std::function<Started()>& start, double seconds) const {
    constexpr double kTogether = 1.5;
    const double both = Least([&] {
      Started work = start();
      const absl::Time end = absl::Now() + absl::Seconds(seconds);
      while (absl::Now() < end) {
      }
      Wait(std::move(work));
    });
    return both < kTogether * seconds;
  }

  comm::Communicator& ranks_;
  const c10::Device device_;
  const int64_t bytes_;
  const absl::Duration timeout_;
};

}  // namespace

absl::StatusOr<StepCosts> MeasureCosts(comm::Communicator& ranks,
                                       c10::Device device, int64_t bytes,
                                       const std::string& directory,
                                       absl::Duration timeout) {
  StepCosts costs;
  Measurement measurement(ranks, device, bytes, timeout);
  absl::Status own = TorchToStatus("measuring memory",
                                   [&] { measurement.MeasureMemory(costs); });
  if (own.ok()) own = measurement.MeasureSsd(directory, costs);
  FSDP_RETURN_IF_ERROR(comm::Agree(ranks, own, "measuring memory and SSD",
                                   absl::Now() + timeout));
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(kLabel, [&] { measurement.MeasureCollectives(costs); }));
  // The program of all ranks is the same, and so are the bytes of its numbers.
  FSDP_ASSIGN_OR_RETURN(
      const std::string first,
      comm::BroadcastString(
          ranks,
          std::string(reinterpret_cast<const char*>(&costs), sizeof(costs)),
          /*root=*/0, kLabel, absl::Now() + timeout));
  FSDP_CHECK(first.size() == sizeof(costs));
  std::memcpy(&costs, first.data(), sizeof(costs));
  return costs;
}

}  // namespace fsdp
