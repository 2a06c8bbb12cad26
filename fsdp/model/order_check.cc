#include "fsdp/model/order_check.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/agreement.h"

namespace fsdp {
namespace {

constexpr char kLabel[] = "the collectives of an iteration";

}  // namespace

absl::Status OrderCheck::Compare(OrderLog order) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Comparison> comparison,
                        Start(std::move(order)));
  if (lags_) std::swap(comparison, under_way_);
  return comparison == nullptr ? absl::OkStatus() : Finish(*comparison);
}

absl::Status OrderCheck::Finish() {
  if (under_way_ == nullptr) return absl::OkStatus();
  const auto comparison = std::exchange(under_way_, nullptr);
  return Finish(*comparison);
}

absl::StatusOr<std::unique_ptr<OrderCheck::Comparison>> OrderCheck::Start(
    OrderLog order) {
  auto comparison = std::make_unique<Comparison>();
  comparison->order = std::move(order);
  // The greatest hash and, of complements, the least one.
  const int64_t bits = static_cast<int64_t>(comparison->order.hash());
  comparison->extremes = at::tensor({bits, ~bits}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(comparison->work,
                        communicator_.AllReduce(comparison->extremes,
                                                comm::ReduceOp::kMax, kLabel));
  return comparison;
}

absl::Status OrderCheck::Finish(Comparison& comparison) {
  const absl::Time deadline = absl::Now() + timeout_;
  FSDP_RETURN_IF_ERROR(comparison.work->Wait(deadline));
  const int64_t* extreme = comparison.extremes.const_data_ptr<int64_t>();
  if (extreme[0] == ~extreme[1]) return absl::OkStatus();
  return comm::CheckSame(communicator_, comparison.order.ToString(), kLabel,
                         deadline);
}

}  // namespace fsdp
