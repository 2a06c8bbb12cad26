#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/gpu_run.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"

namespace fsdp::benchmarks {
namespace {

// Calls in a row, so that the device never waits for the host.
constexpr int kCalls = 10;

class CollectiveRun final : public TurnRun {
 public:
  CollectiveRun(DeviceCollective collective, int64_t bytes, c10::Device device,
                std::shared_ptr<comm::Communicator> group)
      : collective_(collective),
        bytes_(bytes),
        device_(device),
        group_(std::move(group)) {
    const int64_t numel = bytes / static_cast<int64_t>(sizeof(float));
    FSDP_CHECK(numel % group_->world_size() == 0);
    whole_ = OnDevice(numel);
    part_ = OnDevice(numel / group_->world_size());
    copy_ = at::empty_like(whole_);
    Collectives();
    Copies();
    Synchronize(device_);
  }

  double Turn() override {
    const double collectives = Time(device_, [this] { Collectives(); }).whole;
    const double copies = Time(device_, [this] { Copies(); }).whole;
    seconds_.push_back(collectives / kCalls);
    of_copy_.push_back(copies / collectives);
    return seconds_.back();
  }

  Figures GetFigures() const override {
    return {{"GB/s", static_cast<double>(bytes_) / Median(seconds_) / 1e9},
            {"of_copy", Median(of_copy_)}};
  }

 private:
  // Returns memory that the group reaches best.
  at::Tensor OnDevice(int64_t numel) const {
    at::Tensor memory = ValueOrThrow(
        group_->AllocateSymmetric(numel * static_cast<int64_t>(sizeof(float))));
    return memory.view(at::kFloat).fill_(1);
  }

  void Collectives() const {
    for (int i = 0; i < kCalls; ++i) {
      const std::unique_ptr<comm::Work> work = ValueOrThrow(
          collective_ == DeviceCollective::kAllGather
              ? group_->AllGather(whole_, part_, "benchmark")
              : group_->ReduceScatter(part_, whole_, comm::ReduceOp::kSum,
                                      "benchmark"));
      ThrowIfError(work->BlockCurrentStream());
    }
  }

  void Copies() const {
    for (int i = 0; i < kCalls; ++i) copy_.copy_(whole_);
  }

  const DeviceCollective collective_;
  const int64_t bytes_;
  const c10::Device device_;
  const std::shared_ptr<comm::Communicator> group_;
  at::Tensor whole_;
  at::Tensor part_;
  at::Tensor copy_;
  std::vector<double> seconds_;
  std::vector<double> of_copy_;
};

}  // namespace

std::unique_ptr<TurnRun> MakeCollectiveRun(
    DeviceCollective collective, int64_t bytes, c10::Device device,
    std::shared_ptr<comm::Communicator> group) {
  return std::make_unique<CollectiveRun>(collective, bytes, device,
                                         std::move(group));
}

}  // namespace fsdp::benchmarks
