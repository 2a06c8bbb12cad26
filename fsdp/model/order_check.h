// Checks that all ranks make the same collectives in the same order, and marks
// parameters with the model that owns them.
#ifndef FSDP_MODEL_ORDER_CHECK_H_
#define FSDP_MODEL_ORDER_CHECK_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "fsdp/runtime/step_log.h"

namespace fsdp {

// Finds ranks whose collectives do not match, which not every backend can.
// Every reducing backward compares sixteen bytes, because a rank whose order
// has not changed does not know about the others'.
class OrderCheck {
 public:
  // With `lags` the host, which only queues what a device does, does not wait
  // for other hosts here either, and hears of a difference one backward later.
  // `communicator` is of all ranks and must outlive this object.
  OrderCheck(comm::Communicator& communicator, absl::Duration timeout,
             bool lags)
      : communicator_(communicator), timeout_(timeout), lags_(lags) {}

  // Compares the collectives of one backward. Collective. InvalidArgument, on
  // all ranks, names the first difference between two of them.
  absl::Status Compare(OrderLog order);
  // Waits for the comparison that is under way, if any. Collective.
  absl::Status Finish();
  // Drops the comparison without waiting.
  void Drop() { under_way_.reset(); }

 private:
  struct Comparison {
    OrderLog order;
    at::Tensor extremes;
    std::unique_ptr<comm::Work> work;
  };

  absl::Status Finish(Comparison& comparison);

  comm::Communicator& communicator_;
  const absl::Duration timeout_;
  const bool lags_;
  std::unique_ptr<Comparison> under_way_;  // the last backward's, or null
};

class ShardedModel;

// Says whose a module's parameters are, and that their gradients are elsewhere.
// All parameters of a model share one, which may outlive the model. It hangs on
// the tensor's autograd metadata, which stays when the tensor's data is
// replaced. Thread-safe once the model is set.
class ParameterOwner {
 public:
  void set_model(std::weak_ptr<ShardedModel> model) {
    model_ = std::move(model);
  }
  // Returns null if the model is gone.
  std::shared_ptr<ShardedModel> model() const { return model_.lock(); }

  // Between these calls the parameters' own gradients can be used as those of
  // any tensor. Calls may be nested.
  void OpenGradients() { ++opened_; }
  void CloseGradients() { --opened_; }
  bool gradients_are_open() const { return opened_ > 0; }

 private:
  std::weak_ptr<ShardedModel> model_;
  std::atomic<int> opened_{0};
};

// Gives `parameter`, a tensor of a module, to `owner`. Its grad() and
// mutable_grad() then throw StatusError (FailedPrecondition), which says where
// the gradient of `name` is, unless gradients are open or the parameter is
// frozen. Nothing else about it changes.
void SetOwner(const at::Tensor& parameter, const std::string& name,
              std::shared_ptr<const ParameterOwner> owner);

// Returns null if no model owns `parameter`. Costs a few nanoseconds.
const ParameterOwner* OwnerOf(const at::Tensor& parameter);

}  // namespace fsdp

#endif  // FSDP_MODEL_ORDER_CHECK_H_
