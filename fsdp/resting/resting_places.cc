#include "fsdp/resting/resting_places.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/device_copies.h"

namespace fsdp {

using offload::Offloader;

absl::StatusOr<absl::Span<char>> DeferredReleases::Acquire(int entry,
                                                           Offloader::Use use) {
  Poll();
  const auto own = Find(entry);
  if (own != pending_.end()) {
    absl::Span<char> bytes = own->bytes;
    pending_.erase(own);
    if (use != Offloader::Use::kRead) offloader_->MarkChanged(entry);
    return bytes;
  }
  for (;;) {
    absl::StatusOr<absl::Span<char>> bytes = offloader_->Acquire(entry, use);
    if (!absl::IsResourceExhausted(bytes.status()) || pending_.empty()) {
      return bytes;
    }
    FSDP_RETURN_IF_ERROR(Finish(pending_.begin()));
  }
}

void DeferredReleases::Release(int entry, absl::Span<char> bytes,
                               const SharedEvent& used) {
  if (used == nullptr) return offloader_->Release(entry);
  pending_.push_back({entry, bytes, used});
}

void DeferredReleases::Poll() {
  const auto done = std::stable_partition(
      pending_.begin(), pending_.end(),
      [](const Pending& pending) { return pending.used->Done(); });
  for (auto i = pending_.begin(); i != done; ++i) offloader_->Release(i->entry);
  pending_.erase(pending_.begin(), done);
}

absl::Status DeferredReleases::Settle() {
  while (!pending_.empty()) FSDP_RETURN_IF_ERROR(Finish(pending_.begin()));
  return absl::OkStatus();
}

absl::Status DeferredReleases::Settle(int entry) {
  const auto own = Find(entry);
  return own == pending_.end() ? absl::OkStatus() : Finish(own);
}

std::deque<DeferredReleases::Pending>::iterator DeferredReleases::Find(
    int entry) {
  return std::find_if(
      pending_.begin(), pending_.end(),
      [entry](const Pending& pending) { return pending.entry == entry; });
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): an iterator.
absl::Status DeferredReleases::Finish(std::deque<Pending>::iterator pending) {
  FSDP_RETURN_IF_ERROR(AwaitCopy(pending->used, timeout_));
  offloader_->Release(pending->entry);
  pending_.erase(pending);
  return absl::OkStatus();
}

namespace {

// Exceeds the caches.
constexpr int64_t kBytes = int64_t{64} << 20;
// The first run warms up; the fastest of the others counts.
constexpr int kRuns = 4;

// Returns the bytes per second of `run`, which handles `bytes`.
absl::StatusOr<double> Rate(int64_t bytes,
                            absl::FunctionRef<absl::Status()> run) {
  absl::Duration best = absl::InfiniteDuration();
  for (int i = 0; i < kRuns; ++i) {
    const absl::Time begin = absl::Now();
    FSDP_RETURN_IF_ERROR(run());
    if (i > 0) best = std::min(best, absl::Now() - begin);
  }
  // No clock is finer than this, and the time may be 0.
  return static_cast<double>(bytes) /
         absl::ToDoubleSeconds(std::max(best, absl::Nanoseconds(1)));
}

absl::Status Copy(const at::Tensor& to, const at::Tensor& from,
                  c10::Device device, absl::Time deadline) {
  DeviceEvent done;
  FSDP_RETURN_IF_ERROR(TorchToStatus("copy between host and device", [&] {
    to.copy_(from, /*non_blocking=*/true);
    done.Record(device);
  }));
  if (done.Wait(deadline)) return absl::OkStatus();
  return absl::DeadlineExceededError(
      "copy between host and device: the device does not come to its end");
}

// Steps AdamW: a quarter of `memory` each is parameters, gradients and the two
// states.
absl::Status StepOnHost(const at::Tensor& memory) {
  return TorchToStatus("step on the host", [&] {
    const at::Tensor floats = memory.view(at::kFloat);
    const int64_t numel = floats.numel() / 4;
    const auto quarter = [&](int i) {
      return std::vector<at::Tensor>{floats.narrow(0, i * numel, numel)};
    };
    at::_fused_adamw_(quarter(0), quarter(1), quarter(2), quarter(3),
                      /*max_exp_avg_sqs=*/{}, {at::tensor(1.0F)}, /*lr=*/1e-3,
                      /*beta1=*/0.9, /*beta2=*/0.999, /*weight_decay=*/0.01,
                      /*eps=*/1e-8, /*amsgrad=*/false, /*maximize=*/false);
  });
}

}  // namespace

std::string StepRates::ToString() const {
  return absl::StrFormat(
      "up %.1f GB/s, down %.1f GB/s, the host's AdamW %.1f GB/s of parameters",
      up * 1e-9, down * 1e-9, host_step * 1e-9);
}

absl::StatusOr<StepRates> MeasureStepRates(c10::Device device,
                                           offload::PageAllocator& pages,
                                           absl::Time deadline) {
  FSDP_ASSIGN_OR_RETURN(const offload::PageMemory memory,
                        offload::PageMemory::Allocate(pages, kBytes));
  at::Tensor host;
  at::Tensor on_device;
  FSDP_RETURN_IF_ERROR(TorchToStatus("allocate what is copied", [&] {
    host = at::from_blob(memory.data(), {kBytes}, at::TensorOptions(at::kByte));
    host.zero_();
    on_device =
        at::empty({kBytes}, at::TensorOptions(at::kByte).device(device));
  }));
  StepRates rates;
  FSDP_ASSIGN_OR_RETURN(rates.up, Rate(kBytes, [&] {
                          return Copy(on_device, host, device, deadline);
                        }));
  FSDP_ASSIGN_OR_RETURN(rates.down, Rate(kBytes, [&] {
                          return Copy(host, on_device, device, deadline);
                        }));
  FSDP_ASSIGN_OR_RETURN(rates.host_step,
                        Rate(kBytes / 4, [&] { return StepOnHost(host); }));
  return rates;
}

absl::StatusOr<StepRates> SlowestStepRates(const StepRates& mine,
                                           comm::Communicator& world,
                                           absl::string_view what,
                                           absl::Time deadline) {
  const at::Tensor rates =
      at::tensor({mine.up, mine.down, mine.host_step}, at::kDouble);
  FSDP_ASSIGN_OR_RETURN(auto work,
                        world.AllReduce(rates, comm::ReduceOp::kMin, what));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  const double* const least = rates.const_data_ptr<double>();
  return StepRates{least[0], least[1], least[2]};
}

StepOn FasterPlace(const StepRates& rates, const OffloadOptions& options) {
  // The bytes that are moved for each byte of parameters.
  const double parameters = options.parameters == Tier::kDevice ? 0 : 1;
  const double gradients = options.gradients == Tier::kDevice ? 0 : 1;
  const double states =
      options.optimizer == Tier::kDevice ? 0 : options.optimizer_state;
  const double device_step =
      std::max((parameters + gradients + states) / rates.up,
               (parameters + states) / rates.down);
  // Gradients that rest on the host need no copy.
  const double host_step =
      std::max((1 - gradients) / rates.down, 1 / rates.host_step);
  return host_step < device_step ? StepOn::kHost : StepOn::kDevice;
}

}  // namespace fsdp
