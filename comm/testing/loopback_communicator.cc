#include "comm/testing/loopback_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"

namespace fsdp::comm {
namespace {

// A wait sees within this time that the communicator was aborted.
constexpr absl::Duration kLookUp = absl::Milliseconds(1);

// An operation on its stream, and what it needs until it is done.
struct Running {
  DeviceEvent end;
  std::vector<at::Tensor> tensors;
};

// State that a communicator and its works share.
class Ledger {
 public:
  // The first reason stays.
  void Abort(const absl::Status& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_.ok()) {
      aborted_ =
          absl::AbortedError(absl::StrCat("aborted: ", reason.message()));
    }
  }
  absl::Status aborted() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return aborted_;
  }

  // Keeps the tensors of an operation that nobody waits for.
  void Keep(Running running) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kept_.push_back(std::move(running));
  }
  // Lets the tensors of operations go that are done.
  void Sweep() {
    std::vector<Running> done;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto running = std::stable_partition(
        kept_.begin(), kept_.end(),
        [](const Running& kept) { return !kept.end.Done(); });
    std::move(running, kept_.end(), std::back_inserter(done));
    kept_.erase(running, kept_.end());
  }

 private:
  mutable std::mutex mutex_;
  absl::Status aborted_;
  std::vector<Running> kept_;
};

class LoopbackWork final : public Work {
 public:
  LoopbackWork(std::shared_ptr<Ledger> ledger, std::string what,
               Running running)
      : ledger_(std::move(ledger)),
        what_(std::move(what)),
        running_(std::move(running)) {}
  ~LoopbackWork() override {
    if (!running_.tensors.empty()) ledger_->Keep(std::move(running_));
  }

  absl::Status Wait(absl::Time deadline) override {
    if (!result_) result_ = Poll(deadline);
    if (result_->ok()) running_.tensors.clear();
    return *result_;
  }

  // Memory that is freed from now on is first used by that stream.
  absl::Status BlockCurrentStream() override {
    if (result_) return *result_;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(what_, [this] { running_.end.BlockCurrentStream(); }));
    running_.tensors.clear();
    return absl::OkStatus();
  }

 private:
  absl::Status Poll(absl::Time deadline) {
    bool done = false;
    do {
      FSDP_RETURN_IF_ERROR(TorchToStatus(what_, [&] {
        done = running_.end.Wait(std::min(deadline, absl::Now() + kLookUp));
      }));
      if (done) return absl::OkStatus();
      FSDP_RETURN_IF_ERROR(ledger_->aborted());
    } while (absl::Now() < deadline);
    absl::Status late = absl::DeadlineExceededError(
        absl::StrCat(what_, ": its stream has not done it at the deadline"));
    ledger_->Abort(late);
    return late;
  }

  const std::shared_ptr<Ledger> ledger_;
  const std::string what_;
  Running running_;
  std::optional<absl::Status> result_;
};

// Returns `count` consecutive slices of `n` elements each, from slice `first`
// on.
at::Tensor Slices(const at::Tensor& tensor, int64_t first, int64_t count,
                  int64_t n) {
  return TensorOver(tensor.storage(), tensor.storage_offset() + first * n,
                    {count, n}, {n, 1}, tensor.scalar_type());
}

void CopyToAll(const at::Tensor& out, const at::Tensor& in, int rank,
               int world_size) {
  const int64_t n = in.numel();
  const auto copy = [&](int64_t first, int64_t count) {
    if (count == 0) return;
    Slices(out, first, count, n)
        .copy_(TensorOver(in.storage(), in.storage_offset(), {count, n}, {0, 1},
                          in.scalar_type()));
  };
  const bool in_place = Slices(out, rank, 1, n).data_ptr() == in.data_ptr();
  if (!in_place) return copy(0, world_size);
  copy(0, rank);
  copy(rank + 1, world_size - rank - 1);
}

// Integers wrap, as sums do.
at::Scalar Times(int world_size, at::ScalarType dtype) {
  return dtype == at::kByte ? at::Scalar(world_size % 256)
                            : at::Scalar(world_size);
}

void ReduceSlice(const at::Tensor& out, const at::Tensor& slice, ReduceOp op,
                 int world_size) {
  at::Tensor result = out;
  if (op == ReduceOp::kSum && world_size > 1) {
    at::mul_out(result, slice, Times(world_size, out.scalar_type()));
  } else if (out.data_ptr() != slice.data_ptr()) {
    result.copy_(slice);
  }
}

// Rounds once, to the dtype of `out`.
at::Tensor Scaled(const at::Tensor& sum, double scale, at::ScalarType dtype) {
  const auto computed = c10::promoteTypes(
      c10::promoteTypes(sum.scalar_type(), dtype), at::kFloat);
  return at::mul(sum.to(computed), at::Scalar(scale));
}

void ReduceSliceScaled(const at::Tensor& out, const at::Tensor& slice,
                       ScaledSum scaled, int world_size) {
  const at::Tensor sum =
      world_size == 1 ? slice
                      : at::mul(slice, Times(world_size, slice.scalar_type()));
  const at::Tensor result = Scaled(sum, scaled.scale, out.scalar_type());
  if (scaled.accumulate) {
    out.add_(result);
  } else {
    out.copy_(result);
  }
}

absl::Status CheckPlace(const LoopbackPlace& place) {
  if (place.rank >= 0 && place.rank < place.world_size) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a loopback group of ", place.world_size,
                   " ranks has no rank ", place.rank));
}

class LoopbackCommunicator final : public Communicator {
 public:
  LoopbackCommunicator(LoopbackOptions options, RankNames names)
      : options_(std::move(options)),
        names_(std::move(names)),
        stream_(options_.device, SideStream::Priority::kHigh),
        host_(c10::Device(c10::DeviceType::CPU)) {}

  int rank() const override { return options_.place.rank; }
  int world_size() const override { return options_.place.world_size; }
  const RankNames& names() const override { return names_; }
  absl::Duration default_timeout() const override { return options_.timeout; }
  std::string ToString() const override {
    return absl::StrCat("loopback, ", Place());
  }

  bool PrefersScaledInputs() const override {
    return options_.prefers_scaled_inputs;
  }
  bool CanBeCaptured() const override { return !options_.device.is_cpu(); }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return AllocatePlain(bytes, options_.device);
  }

  CreatedCommunicator Split(int color, int /*key*/) override {
    FSDP_RETURN_IF_ERROR(CheckColor(color));
    FSDP_RETURN_IF_ERROR(ledger_->aborted());
    return std::make_unique<LoopbackCommunicator>(options_, names_);
  }

  void Abort(const absl::Status& reason) override { ledger_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const std::string what = absl::StrCat(CollectiveName(args.collective),
                                          " of ", label, " on ", ToString());
    const c10::Device device = args.out.device();
    if (!device.is_cpu() && device != options_.device) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": its tensors are on ", device.str(),
                       ", the group is on ", options_.device.str()));
    }
    FSDP_RETURN_IF_ERROR(ledger_->aborted());
    Running running;
    FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
      ledger_->Sweep();
      const c10::NoGradGuard no_grad;
      begin_.Record(device);
      const SideStream::Scope scope(device.is_cpu() ? host_ : stream_);
      begin_.BlockCurrentStream();
      if (args.out.numel() > 0) Enqueue(args);
      running.end.Record(device);
    }));
    running.tensors = {args.out, args.in};
    return std::make_unique<LoopbackWork>(ledger_, what, std::move(running));
  }
  StartedWork DoScaledSum(const CollectiveArgs& args,
                          absl::string_view label) override {
    return DoCollective(args, label);
  }

 private:
  // Enqueues the operation on the current stream.
  void Enqueue(const CollectiveArgs& args) const {
    const auto& [out, in] = std::tie(args.out, args.in);
    const int ranks = world_size();
    const auto own_slice = [rank = rank(), &in = in](int64_t n) {
      return RangeOf(in, rank * n, n);
    };
    switch (args.collective) {
      case Collective::kAllGather:
        return CopyToAll(out, in, rank(), ranks);
      case Collective::kReduceScatter:
        return args.scaled
                   ? ReduceSliceScaled(out, own_slice(out.numel()),
                                       *args.scaled, ranks)
                   : ReduceSlice(out, own_slice(out.numel()), args.op, ranks);
      case Collective::kAllToAll:
        return CopyToAll(out, own_slice(in.numel() / ranks), rank(), ranks);
      case Collective::kAllReduce:
        return ReduceSlice(out, out, args.op, ranks);
      case Collective::kBroadcast:
      case Collective::kSplit:
        return;
    }
  }

  const LoopbackOptions options_;
  const RankNames names_;
  const SideStream stream_;
  const SideStream host_;  // of tensors on the CPU: none
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  DeviceEvent begin_;
};

}  // namespace

CreatedCommunicator CreateLoopback(const LoopbackOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckPlace(options.place));
  return std::make_unique<LoopbackCommunicator>(
      options, RankNames(options.place.world_size));
}

}  // namespace fsdp::comm
