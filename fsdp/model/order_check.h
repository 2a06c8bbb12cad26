// Whether all ranks make the same collectives in the same order.
#ifndef FSDP_MODEL_ORDER_CHECK_H_
#define FSDP_MODEL_ORDER_CHECK_H_

#include <ATen/core/Tensor.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "fsdp/runtime/order_log.h"

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

}  // namespace fsdp

#endif  // FSDP_MODEL_ORDER_CHECK_H_
