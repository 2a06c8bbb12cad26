// Requests of users between steps, ways in which ranks hold parameters, and the
// same training with plain LibTorch.
#ifndef FSDP_TESTS_MEMORY_MEMORY_REQUESTS_H_
#define FSDP_TESTS_MEMORY_MEMORY_REQUESTS_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::memory_requests {

inline constexpr int64_t kDim = 7;
inline constexpr int kBlocks = 3;
inline constexpr double kRate = 0.5;
inline constexpr absl::Duration kPatience = absl::Seconds(30);

using Net = FullyShardedDataParallel<NetImpl>;
using Group = std::vector<std::unique_ptr<Communicator>>;

absl::Status Fail(const std::string& text);

// How ranks hold the parameters.
struct Way {
  std::string name;
  bool in_one_host;     // a shared-memory group
  bool shares = false;  // Options::share_memory
  bool is_bf16 = false;
};
const std::vector<Way>& Ways();

absl::StatusOr<Group> MakeGroup(const Way& way, int world_size);

Options OptionsFor(const Way& way);

// Calls `tell` when the rank reaches a fence of common memory.
std::shared_ptr<Communicator> WithToldFences(std::shared_ptr<Communicator> base,
                                             std::function<void()> tell);

// A user makes these calls after backward, before and after the optimizer's
// step. `held` blocks meanwhile have the values from before the step.
struct Request {
  std::string name;
  std::function<absl::Status(Net&)> before;
  std::function<absl::Status(Net&)> after;
  std::vector<int> held;    // blocks
  bool holds_root = false;  // the rest
};

std::vector<Request> Requests();

absl::Status UnshardAndWait(torch::nn::Module& module);

torch::nn::Module& Block(Net& model, int i);

// Plain LibTorch on the data of all ranks.
class Plain {
 public:
  Plain(int ranks, bool is_bf16);

  void Step(int step);

  // Computes with the values from before the step in what `request` holds.
  at::Tensor Output(const Request& request, const at::Tensor& x);

  // A factor that is applied after a step, so that the values before it differ
  // in bf16, too.
  static double Growth(int step);

  static at::Tensor Data(int step, int rank);

 private:
  void CopyInto(NetImpl& target);

  const int ranks_;
  const bool is_bf16_;
  const std::shared_ptr<NetImpl> net_;
  const std::shared_ptr<NetImpl> before_;
};

}  // namespace fsdp::testing::memory_requests

#endif  // FSDP_TESTS_MEMORY_MEMORY_REQUESTS_H_
