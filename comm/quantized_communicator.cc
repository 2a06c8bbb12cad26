#include "comm/quantized_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/call.h"
#include "comm/forwarding_communicator.h"
#include "comm/quantized_message.h"
#include "comm/work.h"

namespace fsdp::comm {
namespace {

c10::Stream CurrentStream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// What is left to do with the messages once they are here.
using Finish = std::function<void(const at::Tensor& messages)>;

class QuantizedWork final : public Work {
 public:
  QuantizedWork(std::unique_ptr<Work> base, std::string name,
                at::Tensor messages, Finish finish)
      : base_(std::move(base)),
        name_(std::move(name)),
        messages_(std::move(messages)),
        device_(messages_.device()),
        finish_(std::move(finish)) {}

  // Peers read messages at most, which the base keeps for them.
  absl::Status Wait(absl::Time deadline) override {
    if (!result_) result_ = Finished(base_->WaitForResult(deadline));
    if (!result_->ok() || !finished_on_) return *result_;
    return TorchToStatus([&] { return name_; },
                         [&] { finished_on_->synchronize(); });
  }

  absl::Status BlockCurrentStream() override {
    if (!result_) {
      result_ = Finished(base_->BlockCurrentStream());
    } else if (result_->ok() && finished_on_) {
      return TorchToStatus(
          [&] { return name_; },
          [&] { is_finished_->block(CurrentStream(device_)); });
    }
    return *result_;
  }

 private:
  // `status` of the messages, and of what is done with them then.
  absl::Status Finished(absl::Status status) {
    if (status.ok()) {
      status = TorchToStatus([&] { return name_; }, [&] { RunFinish(); });
    }
    finish_ = nullptr;
    messages_.reset();
    return status;
  }

  void RunFinish() {
    const c10::NoGradGuard no_grad;
    finish_(messages_);
    if (device_.is_cpu()) return;
    finished_on_ = CurrentStream(device_);
    is_finished_.emplace(device_.type());
    is_finished_->record(*finished_on_);
    // It belongs to the stream of the call, which others may allocate from.
    messages_.record_stream(*finished_on_);
  }

  const std::unique_ptr<Work> base_;
  const std::string name_;
  at::Tensor messages_;
  const c10::Device device_;
  Finish finish_;
  absl::optional<absl::Status> result_;
  // On a device, once it is enqueued.
  absl::optional<c10::Stream> finished_on_;
  absl::optional<c10::Event> is_finished_;
};

class QuantizedCommunicator final : public ForwardingCommunicator {
 public:
  QuantizedCommunicator(std::unique_ptr<Communicator> base,
                        const QuantizationOptions& options)
      : ForwardingCommunicator(std::move(base)), options_(options) {}

  std::string ToString() const override {
    return absl::StrCat("quantised ", ForwardingCommunicator::ToString());
  }

  absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes) override {
    if (!options_.gather) return base().AllocateCommon(bytes);
    return absl::UnimplementedError(absl::StrCat(
        ToString(), ": what the ranks have in common would not be quantised"));
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override {
    FSDP_ASSIGN_OR_RETURN(auto group, base().Split(color, key));
    return CreateQuantizedCommunicator(std::move(group), options_);
  }

 protected:
  using StartedWork = absl::StatusOr<std::unique_ptr<Work>>;

  StartedWork DoAllGather(const at::Tensor& out, const at::Tensor& in,
                          absl::string_view label) override {
    const MessageLayout layout(in.numel(), /*exact=*/0, options_.block,
                               in.scalar_type());
    if (!options_.gather || !Applies(layout, out)) {
      return base().AllGather(out, in, label);
    }
    at::Tensor messages;
    at::Tensor own;
    FSDP_RETURN_IF_ERROR(Prepare(Collective::kAllGather, label, [&] {
      messages = NewMessages(layout, in);
      own = messages.narrow(0, rank() * layout.bytes(), layout.bytes());
      WriteMessages(layout, in, own);
      Measure(Collective::kAllGather, label, layout, in, own);
    }));
    return Started(base().AllGather(messages, own, label),
                   Collective::kAllGather, label, messages,
                   [layout, out](const at::Tensor& received) {
                     ReadMessages(layout, received, out);
                   });
  }

  StartedWork DoReduceScatter(const at::Tensor& out, const at::Tensor& in,
                              ReduceOp op, absl::string_view label) override {
    const MessageLayout layout = LayoutOfSum(out, in);
    if (op != ReduceOp::kSum || !options_.reduce || !Applies(layout, in)) {
      return base().ReduceScatter(out, in, op, label);
    }
    return Sum(layout, out, in, {}, label);
  }

  StartedWork DoReduceScatterScaled(const at::Tensor& out, const at::Tensor& in,
                                    ScaledSum sum,
                                    absl::string_view label) override {
    const MessageLayout layout = LayoutOfSum(out, in);
    if (!options_.reduce || !Applies(layout, in)) {
      return base().ReduceScatterScaled(out, in, sum, label);
    }
    return Sum(layout, out, in, sum, label);
  }

 private:
  MessageLayout LayoutOfSum(const at::Tensor& out, const at::Tensor& in) const {
    return MessageLayout(out.numel(), options_.exact_tail, options_.block,
                         in.scalar_type());
  }

  bool Applies(const MessageLayout& layout, const at::Tensor& whole) const {
    return world_size() > 1 && whole.is_floating_point() &&
           layout.quantized() > 0 &&
           static_cast<int64_t>(whole.nbytes()) >= options_.min_bytes;
  }

  StartedWork Sum(const MessageLayout& layout, const at::Tensor& out,
                  const at::Tensor& in, ScaledSum sum,
                  absl::string_view label) {
    at::Tensor sent;
    at::Tensor received;
    FSDP_RETURN_IF_ERROR(Prepare(Collective::kReduceScatter, label, [&] {
      sent = NewMessages(layout, in);
      received = NewMessages(layout, in);
      WriteMessages(layout, in, sent);
      Measure(Collective::kReduceScatter, label, layout, in, sent);
    }));
    return Started(
        base().AllToAll(received, sent, label), Collective::kReduceScatter,
        label, received, [layout, out, sum](const at::Tensor& messages) {
          SumMessages(layout, messages, {sum.scale, sum.accumulate}, out);
        });
  }

  // For each rank one.
  at::Tensor NewMessages(const MessageLayout& layout,
                         const at::Tensor& like) const {
    return at::empty({layout.bytes() * world_size()},
                     like.options().dtype(at::kByte));
  }

  void Measure(Collective collective, absl::string_view label,
               const MessageLayout& layout, const at::Tensor& numbers,
               const at::Tensor& messages) {
    if (options_.log == nullptr) return;
    options_.log->Add(collective, label,
                      MeasureMessages(layout, numbers, messages));
  }

  std::string NameOf(Collective collective, absl::string_view label) const {
    return absl::StrCat("quantised ", CollectiveName(collective), " of ", label,
                        " on rank ", rank(), " of ", world_size());
  }

  template <typename Fn>
  absl::Status Prepare(Collective collective, absl::string_view label, Fn fn) {
    const c10::NoGradGuard no_grad;
    return TorchToStatus([&] { return NameOf(collective, label); }, fn);
  }

  StartedWork Started(StartedWork work, Collective collective,
                      absl::string_view label, at::Tensor messages,
                      Finish finish) {
    FSDP_RETURN_IF_ERROR(work.status());
    return std::make_unique<QuantizedWork>(
        *std::move(work), NameOf(collective, label), std::move(messages),
        std::move(finish));
  }

  const QuantizationOptions options_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateQuantizedCommunicator(
    std::unique_ptr<Communicator> base, const QuantizationOptions& options) {
  if (options.block < 1 || options.min_bytes < 0 || options.exact_tail < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "quantise ", base->ToString(), " in blocks of ", options.block,
        " numbers, from ", options.min_bytes, " bytes on, the last ",
        options.exact_tail,
        " exactly: blocks have at least one number, and nothing is negative"));
  }
  return std::make_unique<QuantizedCommunicator>(std::move(base), options);
}

}  // namespace fsdp::comm
