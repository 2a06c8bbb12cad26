#include "comm/scalars.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/communicator.h"

namespace fsdp::comm {
namespace {

absl::StatusOr<std::vector<double>> Gather(Communicator& communicator,
                                           double value,
                                           absl::string_view label) {
  const at::Tensor in = at::full({1}, value, at::kDouble);
  const at::Tensor out = at::empty({communicator.world_size()}, at::kDouble);
  FSDP_ASSIGN_OR_RETURN(auto work, communicator.AllGather(out, in, label));
  FSDP_RETURN_IF_ERROR(
      work->Wait(absl::Now() + communicator.default_timeout()));
  const double* values = out.const_data_ptr<double>();
  return std::vector<double>(values, values + out.numel());
}

double SumOf(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return sum;
}

}  // namespace

absl::StatusOr<double> Mean(Communicator& communicator, double value) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> values,
                        Gather(communicator, value, "the mean of a number"));
  return SumOf(values) / communicator.world_size();
}

absl::StatusOr<double> Sum(Communicator& communicator, double value) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> values,
                        Gather(communicator, value, "the sum of a number"));
  return SumOf(values);
}

absl::StatusOr<double> Max(Communicator& communicator, double value) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> values,
                        Gather(communicator, value, "the maximum of a number"));
  double max = values[0];
  for (double other : values) {
    if (std::isnan(other)) return other;
    if (other > max) max = other;
  }
  return max;
}

}  // namespace fsdp::comm
