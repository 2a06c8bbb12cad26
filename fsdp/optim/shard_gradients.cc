#include "fsdp/optim/shard_gradients.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "comm/agreement.h"
#include "fsdp/optim/fused_runs.h"

namespace fsdp {
namespace {

// A longer sum loses digits if one float32 accumulates most of it, as on the
// CPU.
constexpr int64_t kLongestRun = int64_t{1} << 24;

bool CanBeMerged(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.is_contiguous() &&
         !gradient.is_neg() && !gradient.is_inference();
}

bool IsFinite(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_floating_point()) {
    return true;
  }
  const Resident resident = ValueOrThrow(Resident::Of(tensor, Use::kRead));
  // Takes the largest absolute value in one pass; NaN stays NaN.
  return std::isfinite(
      at::linalg_vector_norm(tensor, std::numeric_limits<double>::infinity())
          .item<double>());
}

}  // namespace

std::vector<GradientGroup> GroupGradients(
    absl::Span<const TensorRange> shards) {
  std::vector<GradientGroup> groups;
  for (const TensorRange& named : shards) {
    const at::Tensor& gradient = named.values.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const GradientGroup& group) {
                                return group.device == gradient.device() &&
                                       group.dtype == gradient.scalar_type() &&
                                       group.replicas == named.replicas;
                              });
    if (group == groups.end()) {
      group = groups.insert(
          group,
          {gradient.device(), gradient.scalar_type(), named.replicas, {}});
    }
    group->each.push_back(gradient);
  }
  for (GradientGroup& group : groups) {
    for (const at::Tensor& gradient : group.each) {
      std::vector<at::Tensor>& runs = group.gradients;
      if (!runs.empty() && CanBeMerged(runs.back()) && CanBeMerged(gradient) &&
          FollowsInMemory(runs.back(), gradient) &&
          runs.back().numel() + gradient.numel() <= kLongestRun) {
        const at::Tensor& run = runs.back();
        runs.back() =
            TensorOver(run.storage(), run.storage_offset(),
                       {run.numel() + gradient.numel()}, {1}, group.dtype);
      } else {
        runs.push_back(gradient);
      }
    }
  }
  return groups;
}

void CountWrites(const GradientGroup& group) {
  if (group.gradients.size() == group.each.size())
    return;  // operators counted already
  for (const at::Tensor& gradient : group.each) {
    gradient.unsafeGetTensorImpl()->bump_version();
  }
}

absl::Status ForEachInMemory(
    const std::vector<at::Tensor>& gradients, Use use,
    absl::FunctionRef<void(const std::vector<at::Tensor>&)> visit) {
  if (!std::any_of(gradients.begin(), gradients.end(), RestsElsewhere)) {
    visit(gradients);
    return absl::OkStatus();
  }
  const auto end = gradients.end();
  const auto next_memory = [&](auto from) {
    return std::find_if(from, end, [&](const at::Tensor& gradient) {
      return RestingMemory::Of(gradient) != RestingMemory::Of(*from);
    });
  };
  for (auto begin = gradients.begin(); begin != end;) {
    const auto next = next_memory(begin);
    if (next != end) PrefetchTensor(*next);
    FSDP_ASSIGN_OR_RETURN(const Resident resident, Resident::Of(*begin, use));
    visit(std::vector<at::Tensor>(begin, next));
    begin = next;
  }
  return absl::OkStatus();
}

absl::Status OrAbort(comm::Communicator& world, const std::string& what,
                     FallibleRef fn) {
  absl::Status status = TorchToStatus(what, fn);
  if (!status.ok()) world.Abort(status);
  return status;
}

at::Device DeviceOf(absl::Span<const TensorRange> shards) {
  return shards.empty() ? at::Device(at::kCPU) : shards.front().values.device();
}

absl::Status ReduceNumber(comm::Communicator& world, const at::Tensor& number,
                          comm::ReduceOp op, const std::string& label,
                          std::optional<absl::Duration> timeout) {
  FSDP_ASSIGN_OR_RETURN(auto work, world.AllReduce(number, op, label));
  if (!number.is_cpu()) return work->BlockCurrentStream();
  return work->Wait(absl::Now() + timeout.value_or(world.default_timeout()));
}

absl::StatusOr<NotFinite> FindNotFinite(comm::Communicator* world,
                                        absl::Span<const TensorRange> shards,
                                        const std::string& label) {
  const auto none = static_cast<int64_t>(shards.size());
  // Counts from the end, so that the maximum over the ranks is the first one.
  const at::Tensor left = at::zeros({2}, at::kLong);
  auto* const numbers = left.mutable_data_ptr<int64_t>();
  const absl::Status searched = TorchToStatus(label, [&] {
    const c10::NoGradGuard no_grad;
    for (int64_t i = none - 1; i >= 0; --i) {
      const at::Tensor& shard = shards[i].values;
      if (!IsFinite(shard)) numbers[0] = none - i;
      if (!IsFinite(shard.grad())) numbers[1] = none - i;
    }
  });
  if (world != nullptr) {
    FSDP_RETURN_IF_ERROR(comm::Agree(*world, searched, label,
                                     absl::Now() + world->default_timeout()));
    FSDP_ASSIGN_OR_RETURN(auto work,
                          world->AllReduce(left, comm::ReduceOp::kMax, label));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + world->default_timeout()));
  }
  FSDP_RETURN_IF_ERROR(searched);
  const auto name = [&](int which) {
    return numbers[which] == 0 ? std::string()
                               : shards[none - numbers[which]].name;
  };
  return NotFinite{name(0), name(1)};
}

}  // namespace fsdp
