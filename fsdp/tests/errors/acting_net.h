// A net that does what a test says, with transparent units.
#ifndef FSDP_TESTS_ERRORS_ACTING_NET_H_
#define FSDP_TESTS_ERRORS_ACTING_NET_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::acting_net {

using Code = absl::StatusCode;

inline constexpr int64_t kDim = 4;
inline constexpr int kRanks = 2;

// Does what `act` says; without one, computes like a plain model of three
// layers.
class Acting : public torch::nn::Module {
 public:
  using Act = std::function<at::Tensor(Acting& net, const at::Tensor& x)>;
  Acting()
      : first(register_module("first", Linear(kDim, kDim))),
        second(register_module("second", Linear(kDim, kDim))),
        third(register_module("third", Linear(kDim, kDim))) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (act) return act(*this, x);
    return third->forward(second->forward(first->forward(x).tanh()).tanh());
  }
  Linear first, second, third;
  Act act;
};

using Model = FullyShardedDataParallel<Acting>;

// Makes every layer a transparent unit.
Options TransparentOptions();

absl::StatusOr<Model> ShardActing(
    Communicator& communicator, const Options& options = TransparentOptions());

// Checks that nothing is gathered, whatever has happened, and that a step has
// the loss and gradients of a model that has never failed.
absl::Status CheckStepIsExact(Model& model, Communicator& communicator);

// Returns an error if `status` has another code or text.
absl::Status Expect(const absl::Status& status, Code code,
                    const std::string& text);

// Expects `act` to fail alike on all ranks, in the model's forward or its
// backward, and the model to be as good as new afterwards.
void ExpectFails(const Acting::Act& act, Code code, const std::string& text);

}  // namespace fsdp::testing::acting_net

#endif  // FSDP_TESTS_ERRORS_ACTING_NET_H_
