// Tests of sharded models are in namespace fsdp::testing and include this, or a
// header beside it that exports it: the library, ranks as threads, a toy model,
// and matchers.
#ifndef FSDP_TESTING_SHARDED_TEST_H_
#define FSDP_TESTING_SHARDED_TEST_H_

// IWYU pragma: begin_exports
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/testing/check_that.h"
#include "base/testing/compare_tensors.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/mesh.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/strategies.h"
#include "fsdp/testing/toy_model.h"
// IWYU pragma: end_exports

namespace fsdp::testing {

using Code = absl::StatusCode;
using comm::Collective;
using comm::CollectiveLog;
using comm::Communicator;
using comm::Mesh;
using comm::testing::AllOk;
using comm::testing::CreateSharedMemoryGroup;
using comm::testing::RunAllRanks;
using comm::testing::RunRanks;
using ::testing::_;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Le;
using ::testing::SizeIs;
using torch::nn::Linear;

// Ranks of a local group, each of which records its collectives.
struct RecordedRanks {
  explicit RecordedRanks(int ranks)
      : logs(ranks), group(comm::CreateLocalGroup(ranks).value()) {
    for (int rank = 0; rank < ranks; ++rank) {
      group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
    }
  }
  std::vector<CollectiveLog> logs;  // by rank
  std::vector<std::unique_ptr<Communicator>> group;
};

// Returns ranks of a group, which may share memory.
inline absl::StatusOr<comm::testing::Group> MakeGroup(int world_size,
                                                      bool shares_memory) {
  return shares_memory ? CreateSharedMemoryGroup(world_size)
                       : comm::CreateLocalGroup(world_size);
}

// Does what RunAllRanks() does with ranks that share memory.
inline absl::Status RunSharing(int world_size,
                               const comm::testing::RankFunction& fn) {
  return AllOk(RunRanks(CreateSharedMemoryGroup(world_size).value(), fn));
}

// With these options, ranks that all fail alike go on.
inline Options GoOn(Options options = BlockUnits()) {
  options.abort_on_failure = false;
  return options;
}

// Checks that `status` is a refusal that has `text` in its message.
inline absl::Status CheckRefused(const absl::Status& status,
                                 const std::string& text,
                                 Code code = Code::kFailedPrecondition) {
  return CheckThat(status, StatusIs(code, HasSubstr(text)), "refusal");
}

// Matches the statuses of ranks that all have this refusal.
inline auto AllRefuse(const std::string& text,
                      Code code = Code::kFailedPrecondition) {
  return Each(StatusIs(code, HasSubstr(text)));
}

// Returns what `shard` has of a whole tensor, flat.
inline at::Tensor OwnPart(const TensorRange& shard, const at::Tensor& whole) {
  return whole.reshape({-1}).narrow(0, shard.begin, shard.values.numel());
}

// Checks that all gradients of `model` are there and have the bits of those of
// `expected`.
inline absl::Status CheckSameGradients(const ShardedModuleBase& model,
                                       const ShardedModuleBase& expected) {
  for (size_t i = 0; i < model.Ranges().size(); ++i) {
    const TensorRange& named = model.Ranges()[i];
    const at::Tensor& gradient = expected.Ranges()[i].values.grad();
    if (named.values.grad().defined() && gradient.defined() &&
        at::equal(named.values.grad(), gradient)) {
      continue;
    }
    return absl::InternalError(
        absl::StrCat("gradient of ", named.name, " has other bits"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_SHARDED_TEST_H_
