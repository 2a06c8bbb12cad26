// Whether all ranks make the same collectives in the same order.
#ifndef FSDP_MODEL_ORDER_CHECK_H_
#define FSDP_MODEL_ORDER_CHECK_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "fsdp/runtime/step_log.h"

namespace fsdp {

// Where a backend cannot see that ranks' collectives do not match, this can.
// Every reducing backward compares, since a rank whose order is as before does
// not know that another's has changed: sixteen bytes.
class OrderCheck {
 public:
  // `lags`: a host that only queues what a device does waits for no other host
  // either, and hears of a difference one backward later. `communicator`, of
  // all ranks, outlives this object.
  OrderCheck(comm::Communicator& communicator, absl::Duration timeout,
             bool lags)
      : communicator_(communicator), timeout_(timeout), lags_(lags) {}

  // Compares what one backward has made. Collective. InvalidArgument on all
  // ranks, naming the first difference of two of them.
  absl::Status Compare(OrderLog order);
  // Waits for the comparison under way, if there is one. Collective.
  absl::Status Finish();
  // Waits for nothing.
  void Drop() { under_way_.reset(); }

 private:
  struct Comparison {
    OrderLog order;
    at::Tensor extremes;
    std::unique_ptr<comm::Work> work;
  };

  absl::StatusOr<std::unique_ptr<Comparison>> Start(OrderLog order);
  absl::Status Finish(Comparison& comparison);

  comm::Communicator& communicator_;
  const absl::Duration timeout_;
  const bool lags_;
  std::unique_ptr<Comparison> under_way_;  // of the last backward, or null
};

// What a sharded model leaves at the parameters of its module: whose they are,
// and that their gradients are elsewhere.
//
// It hangs on LibTorch's autograd metadata of the tensor, which stays when the
// tensor's data is replaced.

class ShardedModel;

// One for all parameters of a model, which may outlive it. Thread-safe once the
// model is set.
class ParameterOwner {
 public:
  void set_model(std::weak_ptr<ShardedModel> model) {
    model_ = std::move(model);
  }
  // Null when it is gone.
  std::shared_ptr<ShardedModel> model() const { return model_.lock(); }

  // Between these the parameters' own gradients may be used as those of any
  // tensor. May be nested.
  void OpenGradients() { ++opened_; }
  void CloseGradients() { --opened_; }
  bool gradients_are_open() const { return opened_ > 0; }

 private:
  std::weak_ptr<ShardedModel> model_;
  std::atomic<int> opened_{0};
};

// Gives `parameter`, a tensor of a module, to `owner`. From then on grad() and
// mutable_grad() of it throw StatusError (FailedPrecondition) that names the
// parameter as `name` and says where its gradient is, unless gradients are open
// or it is frozen. Everything else about it stays as it is.
void SetOwner(const at::Tensor& parameter, const std::string& name,
              std::shared_ptr<const ParameterOwner> owner);

// Null where no model owns `parameter`. Costs a few nanoseconds.
const ParameterOwner* OwnerOf(const at::Tensor& parameter);

}  // namespace fsdp

#endif  // FSDP_MODEL_ORDER_CHECK_H_
