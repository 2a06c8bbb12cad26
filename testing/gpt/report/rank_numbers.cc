#include "testing/gpt/report/rank_numbers.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <memory>

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/communicator.h"

namespace gpt {

absl::StatusOr<std::vector<std::vector<int64_t>>> GatherNumbers(
    const std::vector<int64_t>& mine, absl::string_view label,
    fsdp::comm::Communicator& communicator) {
  const int64_t count = static_cast<int64_t>(mine.size());
  const at::Tensor all =
      at::empty({communicator.world_size() * count}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(
      std::unique_ptr<fsdp::comm::Work> work,
      communicator.AllGather(all, at::tensor(mine, at::kLong), label));
  FSDP_RETURN_IF_ERROR(
      work->Wait(absl::Now() + communicator.default_timeout()));
  const int64_t* next = all.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> by_rank;
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    by_rank.emplace_back(next, next + count);
    next += count;
  }
  return by_rank;
}

}  // namespace gpt
