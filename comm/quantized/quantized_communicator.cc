#include "comm/quantized/quantized_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {
namespace {

// The messages of a collective; one tensor may be a part of the other.
struct Messages {
  at::Tensor sent;
  at::Tensor received;
};

using Finish = std::function<void(const at::Tensor& received)>;

std::optional<c10::Stream> CurrentStream(c10::Device device) {
  if (!HasStreams(device)) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Uses the messages once they are here; aborts `group` if that fails.
class QuantizedWork final : public Work {
 public:
  QuantizedWork(std::unique_ptr<Work> base, std::weak_ptr<Communicator> group,
                std::string name, Messages messages, Finish finish)
      : base_(std::move(base)),
        group_(std::move(group)),
        name_(std::move(name)),
        messages_(std::move(messages)),
        finish_(std::move(finish)),
        caller_(CurrentStream(messages_.received.device())) {}

  // Peers at most read messages, which the base keeps for them.
  absl::Status Wait(absl::Time deadline) override {
    if (!result_) result_ = Finished(base_->WaitForResult(deadline));
    if (result_->ok()) result_ = FinishedBy(deadline);
    return *result_;
  }

  absl::Status BlockCurrentStream() override {
    if (!result_) {
      result_ = Finished(base_->BlockCurrentStream());
    } else if (result_->ok()) {
      return TorchToStatus(name_, [&] { is_finished_.BlockCurrentStream(); });
    }
    return *result_;
  }

 private:
  // Takes the status of the messages; returns that of using them, too.
  absl::Status Finished(absl::Status status) {
    if (status.ok()) {
      const c10::NoGradGuard no_grad;
      status = TorchToStatus(name_, [&] { finish_(messages_.received); });
      // Kernels that have begun read the messages, whatever has failed since.
      status.Update(TorchToStatus(name_, [&] { OrderMessages(); }));
      if (!status.ok()) AbortGroup(status);
    }
    finish_ = nullptr;
    messages_ = Messages();
    return status;
  }

  // Returns the memory of messages to the stream of the call, in its order.
  // record_stream() would keep it until the device is done, so that a host far
  // ahead would allocate messages for all units.
  void OrderMessages() {
    const c10::Device device = messages_.received.device();
    is_finished_.Record(device);
    if (caller_ == CurrentStream(device)) return;
    const c10::StreamGuard beside(*caller_);
    is_finished_.BlockCurrentStream();
  }

  absl::Status FinishedBy(absl::Time deadline) {
    bool is_done = false;
    absl::Status status =
        TorchToStatus(name_, [&] { is_done = is_finished_.Wait(deadline); });
    if (is_done) return absl::OkStatus();
    if (status.ok()) {
      status = absl::DeadlineExceededError(
          absl::StrCat(name_,
                       ": what makes numbers of the messages is not done at "
                       "the deadline"));
    }
    AbortGroup(status);
    return status;
  }

  void AbortGroup(const absl::Status& reason) {
    if (const auto group = group_.lock()) group->Abort(reason);
  }

  const std::unique_ptr<Work> base_;
  // Weak, so that a rank can leave while it still has works.
  const std::weak_ptr<Communicator> group_;
  const std::string name_;
  Messages messages_;
  Finish finish_;
  const std::optional<c10::Stream> caller_;  // none on the CPU
  std::optional<absl::Status> result_;
  DeviceEvent is_finished_;
};

bool IsQuantized(const MessageLayout& layout, at::ScalarType dtype,
                 int world_size, const QuantizationOptions& options) {
  const int64_t bytes = layout.numel() * world_size *
                        static_cast<int64_t>(c10::elementSize(dtype));
  return world_size > 1 && c10::isFloatingType(dtype) &&
         layout.quantized() > 0 && bytes >= options.min_bytes;
}

class Int8Gathers final : public GatherExtension {
 public:
  explicit Int8Gathers(const QuantizationOptions& options)
      : options_(options) {}

  std::string ToString() const override {
    return absl::StrCat("int8 in blocks of ", options_.block, " from ",
                        options_.min_bytes, " bytes on");
  }
  int64_t MessageBytes(int64_t numel, at::ScalarType dtype,
                       int world_size) const override {
    const MessageLayout layout = LayoutOf(numel, dtype);
    const bool applies = IsQuantized(layout, dtype, world_size, options_);
    return applies ? layout.bytes() : 0;
  }
  void Write(absl::string_view label, const at::Tensor& numbers,
             const at::Tensor& message) override {
    const MessageLayout layout =
        LayoutOf(numbers.numel(), numbers.scalar_type());
    WriteMessages(layout, numbers, message);
    if (options_.log == nullptr) return;
    options_.log->Add(Collective::kAllGather, label,
                      MeasureMessages(layout, numbers, message));
  }
  void Read(absl::string_view, const at::Tensor& messages,
            const at::Tensor& numbers) override {
    ReadMessages(LayoutOf(numbers.size(1), numbers.scalar_type()),
                 messages.flatten(), numbers.flatten());
  }

 private:
  MessageLayout LayoutOf(int64_t numel, at::ScalarType dtype) const {
    return MessageLayout(numel, /*exact=*/0, options_.block, dtype);
  }

  const QuantizationOptions options_;
};

std::shared_ptr<GatherExtension> GathersOf(const QuantizationOptions& options) {
  if (options.gather_extension != nullptr) return options.gather_extension;
  return std::make_shared<Int8Gathers>(options);
}

// Returns the bytes of one rank's message; not positive: there are none.
int64_t GatherBytes(const GatherExtension& gathers, int64_t numel,
                    at::ScalarType dtype, int world_size,
                    const QuantizationOptions& options) {
  const bool applies =
      options.gather && world_size > 1 && c10::isFloatingType(dtype);
  return applies ? gathers.MessageBytes(numel, dtype, world_size) : 0;
}

class QuantizedCommunicator final : public ForwardingCommunicator {
 public:
  QuantizedCommunicator(const std::shared_ptr<Communicator>& base,
                        const QuantizationOptions& options)
      : ForwardingCommunicator(base),
        group_(base),
        options_(options),
        gathers_(GathersOf(options)) {}

  std::string ToString() const override {
    return absl::StrCat("quantised ", ForwardingCommunicator::ToString());
  }

  // Excludes a log, which the host reads, and an extension of the user's.
  bool CanBeCaptured() const override {
    return base().CanBeCaptured() && options_.log == nullptr &&
           options_.gather_extension == nullptr;
  }
  bool HasCommonMemory() const override {
    return !options_.gather && base().HasCommonMemory();
  }
  absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes) override {
    if (!options_.gather) return base().AllocateCommon(bytes);
    return absl::UnimplementedError(absl::StrCat(
        ToString(), ": what the ranks have in common would not be quantised"));
  }
  CreatedCommunicator Split(int color, int key) override {
    FSDP_ASSIGN_OR_RETURN(auto group, base().Split(color, key));
    return CreateQuantizedCommunicator(std::move(group), options_);
  }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    if (args.collective == Collective::kAllGather) {
      return Gather(args, label);
    }
    if (args.collective == Collective::kReduceScatter &&
        args.op == ReduceOp::kSum) {
      return Sum(args, label);
    }
    return base().StartCollective(args, label);
  }
  StartedWork DoScaledSum(const CollectiveArgs& args,
                          absl::string_view label) override {
    return Sum(args, label);
  }

 private:
  StartedWork Gather(const CollectiveArgs& args, absl::string_view label) {
    const at::Tensor& in = args.in;
    const int64_t bytes = GatherBytes(*gathers_, in.numel(), in.scalar_type(),
                                      world_size(), options_);
    if (bytes <= 0) return base().StartCollective(args, label);
    Messages messages;
    FSDP_RETURN_IF_ERROR(Prepare(Collective::kAllGather, label, [&] {
      messages.received =
          at::empty({bytes * world_size()}, in.options().dtype(at::kByte));
      messages.sent = messages.received.narrow(0, rank() * bytes, bytes);
      gathers_->Write(label, in, messages.sent);
    }));
    return Started(base().AllGather(messages.received, messages.sent, label),
                   Collective::kAllGather, label, messages,
                   [gathers = gathers_, out = args.out, ranks = world_size(),
                    name = std::string(label)](const at::Tensor& received) {
                     gathers->Read(name, received.view({ranks, -1}),
                                   out.view({ranks, -1}));
                   });
  }

  StartedWork Sum(const CollectiveArgs& args, absl::string_view label) {
    const at::Tensor& in = args.in;
    const MessageLayout layout(args.out.numel(), options_.exact_tail,
                               options_.block, in.scalar_type());
    if (!options_.reduce ||
        !IsQuantized(layout, in.scalar_type(), world_size(), options_)) {
      return base().StartCollective(args, label);
    }
    Messages messages;
    FSDP_RETURN_IF_ERROR(Prepare(Collective::kReduceScatter, label, [&] {
      messages.sent = at::empty({layout.bytes() * world_size()},
                                in.options().dtype(at::kByte));
      messages.received = at::empty_like(messages.sent);
      WriteMessages(layout, in, messages.sent);
      if (options_.log == nullptr) return;
      options_.log->Add(Collective::kReduceScatter, label,
                        MeasureMessages(layout, in, messages.sent));
    }));
    return Started(
        base().AllToAll(messages.received, messages.sent, label),
        Collective::kReduceScatter, label, messages,
        [layout, out = args.out,
         sum = args.scaled.value_or(ScaledSum())](const at::Tensor& received) {
          SumMessages(layout, received, {sum.scale, sum.accumulate}, out);
        });
  }

  std::string NameOf(Collective collective, absl::string_view label) const {
    return absl::StrCat("quantised ", CollectiveName(collective), " of ", label,
                        " on ", Place());
  }

  template <typename Fn>
  absl::Status Prepare(Collective collective, absl::string_view label, Fn fn) {
    const c10::NoGradGuard no_grad;
    return TorchToStatus([&] { return NameOf(collective, label); }, fn);
  }

  StartedWork Started(StartedWork work, Collective collective,
                      absl::string_view label, Messages messages,
                      Finish finish) {
    FSDP_RETURN_IF_ERROR(work.status());
    return std::make_unique<QuantizedWork>(
        *std::move(work), group_, NameOf(collective, label),
        std::move(messages), std::move(finish));
  }

  const std::weak_ptr<Communicator> group_;  // base()
  const QuantizationOptions options_;
  const std::shared_ptr<GatherExtension> gathers_;
};

}  // namespace

CreatedCommunicator CreateQuantizedCommunicator(
    const std::shared_ptr<Communicator>& base,
    const QuantizationOptions& options) {
  FSDP_CHECK(options.block >= 1 && options.block <= device_ops::kMaxBlock &&
             options.min_bytes >= 0 && options.exact_tail >= 0);
  return std::make_unique<QuantizedCommunicator>(base, options);
}

int64_t GatherMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                           const QuantizationOptions& options) {
  const int64_t bytes =
      GatherBytes(*GathersOf(options), numel, dtype, world_size, options);
  return std::max<int64_t>(0, bytes) * world_size;
}

// Counts the messages that are sent and those that come.
int64_t SumMessageBytes(int64_t numel, at::ScalarType dtype, int world_size,
                        const QuantizationOptions& options) {
  const MessageLayout layout(numel, options.exact_tail, options.block, dtype);
  const bool applies = IsQuantized(layout, dtype, world_size, options);
  return options.reduce && applies ? int64_t{2} * world_size * layout.bytes()
                                   : 0;
}

}  // namespace fsdp::comm
