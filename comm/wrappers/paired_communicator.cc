#include "comm/wrappers/paired_communicator.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {
namespace {

struct Pair {
  std::unique_ptr<Communicator> host;
  std::unique_ptr<Communicator> device;
};

// Tells the other backend when this one has failed: the peers may be waiting
// there.
class PairedWork final : public Work {
 public:
  PairedWork(std::unique_ptr<Work> base, std::weak_ptr<Pair> pair)
      : base_(std::move(base)), pair_(std::move(pair)) {}

  absl::Status Wait(absl::Time deadline) override {
    return Noted(base_->Wait(deadline));
  }
  absl::Status WaitForResult(absl::Time deadline) override {
    return Noted(base_->WaitForResult(deadline));
  }
  absl::Status BlockCurrentStream() override {
    return Noted(base_->BlockCurrentStream());
  }
  int64_t number() const override { return base_->number(); }

 private:
  absl::Status Noted(absl::Status status) {
    const std::shared_ptr<Pair> pair = pair_.lock();
    if (!status.ok() && pair != nullptr) {
      pair->host->Abort(status);
      pair->device->Abort(status);
    }
    return status;
  }

  const std::unique_ptr<Work> base_;
  const std::weak_ptr<Pair> pair_;
};

// What it says of itself is true of the device's group; the host's group
// answers for itself.
class PairedCommunicator final : public ForwardingCommunicator {
 public:
  explicit PairedCommunicator(std::shared_ptr<Pair> pair)
      : ForwardingCommunicator(
            std::shared_ptr<Communicator>(pair, pair->device.get())),
        pair_(std::move(pair)) {}

  std::string ToString() const override {
    return absl::StrCat("on the host ", pair_->host->ToString(),
                        "; on the device ", pair_->device->ToString());
  }
  bool CanBeCaptured() const override { return base().CanBeCaptured(); }
  CreatedCommunicator Split(int color, int key) override {
    FSDP_ASSIGN_OR_RETURN(auto host, pair_->host->Split(color, key));
    auto device = pair_->device->Split(color, key);
    if (!device.ok()) {
      Abort(device.status());
      return device.status();
    }
    return CreatePairedCommunicator(std::move(host), *std::move(device));
  }
  void Abort(const absl::Status& reason) override {
    pair_->host->Abort(reason);
    pair_->device->Abort(reason);
  }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    Communicator& backend =
        args.out.device().is_cpu() ? *pair_->host : *pair_->device;
    FSDP_ASSIGN_OR_RETURN(auto work, backend.StartCollective(args, label));
    return std::make_unique<PairedWork>(std::move(work), pair_);
  }

 private:
  const std::shared_ptr<Pair> pair_;
};

}  // namespace

CreatedCommunicator CreatePairedCommunicator(
    std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> device) {
  if (host == nullptr || device == nullptr) {
    return absl::InvalidArgumentError(
        "pair two backends: one of them is missing");
  }
  if (host->rank() != device->rank() ||
      host->world_size() != device->world_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pair two backends: ", host->ToString(), " and ", device->ToString(),
        " are not of the same ranks; create both with the same rank and size"));
  }
  return std::make_unique<PairedCommunicator>(
      std::make_shared<Pair>(Pair{std::move(host), std::move(device)}));
}

}  // namespace fsdp::comm
