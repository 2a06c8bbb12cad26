#include "comm/testing/ranks_of_one_host.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm::testing {

std::vector<Environment> RanksOfOneHost(int world_size) {
  Environment environment;
  environment.world_size = environment.local_world_size = world_size;
  environment.master_addr = "127.0.0.1";
  environment.master_port = Listen("127.0.0.1", 0)->port;
  environment.started_by = StartedBy::kSlurm;
  std::vector<Environment> ranks(world_size, environment);
  for (int rank = 0; rank < world_size; ++rank) {
    ranks[rank].rank = ranks[rank].local_rank = rank;
  }
  return ranks;
}

absl::Status SumRanks(Communicator& communicator, c10::Device device) {
  const int n = communicator.world_size();
  const at::Tensor sum =
      at::full({5}, communicator.rank(),
               at::TensorOptions().dtype(at::kLong).device(device));
  FSDP_ASSIGN_OR_RETURN(auto work,
                        communicator.AllReduce(sum, ReduceOp::kSum, "ranks"));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + absl::Seconds(30)));
  return fsdp::testing::CheckThat(
      sum.sum().item<int64_t>(), 5 * n * (n - 1) / 2,
      absl::StrCat("the sum of the ranks on ", device.str()));
}

ConnectOptions Options(absl::Duration connect_timeout) {
  ConnectOptions options;
  options.connect_timeout = connect_timeout;
  options.timeout = kLimit;
  return options;
}

std::vector<absl::Status> RunInThreads(
    int num_threads, const std::function<absl::Status(int)>& fn) {
  std::vector<absl::Status> results(num_threads);
  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] { results[i] = fn(i); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::vector<absl::Status> ConnectAll(const std::vector<Environment>& ranks,
                                     const ConnectOptions& options) {
  return RunInThreads(
      static_cast<int>(ranks.size()), [&](int i) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                              Connect(ranks[i], options));
        if (communicator->default_timeout() != options.timeout) {
          return absl::InternalError("the timeout is wrong");
        }
        return SumRanks(*communicator);
      });
}

}  // namespace fsdp::comm::testing
