// Compares the gradients of a sharded module with those of a plain one.
#ifndef FSDP_TESTING_GRADIENT_CHECK_H_
#define FSDP_TESTING_GRADIENT_CHECK_H_

#include "fsdp/memory/resting_memory.h"
#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

inline constexpr int64_t kDim = 5;
using Gradients = std::map<std::string, at::Tensor>;

using Forwarding = std::function<at::Tensor(at::Tensor)>;
using LossOf = std::function<at::Tensor(Forwarding)>;

// Returns another input for each rank, so that a gradient that is not reduced
// is wrong.
inline at::Tensor InputOf(int rank, const at::Tensor& input) {
  return input * (1 + rank) + 0.25 * rank;
}

// Adds the share of `plain`, one of `world_size` modules, in the mean of all
// gradients, in storage order.
inline void AddShare(const torch::nn::Module& plain, int world_size,
                     Gradients& means) {
  for (const auto& item : plain.named_parameters()) {
    at::Tensor gradient = item.value().grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    // All parameters compared here are row-major or transposed.
    const at::Tensor dense = item.value().is_contiguous()
                                 ? gradient.reshape({-1})
                                 : gradient.t().reshape({-1});
    at::Tensor& mean = means[item.key()];
    const at::Tensor share = dense / world_size;
    mean = mean.defined() ? mean + share : share;
  }
}

// Returns the means of the gradients of `nets`, in storage order; a missing one
// counts as zero. Leaves out those that no net has.
template <typename Net>
Gradients MeansOf(const std::vector<std::shared_ptr<Net>>& nets) {
  Gradients means;
  for (const auto& net : nets) {
    AddShare(*net, static_cast<int>(nets.size()), means);
  }
  return means;
}

// Checks that this rank's gradients nearly equal its parts of `means`, and that
// the same names have one.
inline absl::Status CheckOwnGradients(const ShardedModuleBase& model,
                                      const Gradients& means,
                                      double relative = 1e-4,
                                      double absolute = 1e-6) {
  for (const TensorRange& named : model.Ranges()) {
    const auto whole = means.find(named.name);
    const at::Tensor& gradient = named.values.grad();
    if (gradient.defined() != (whole != means.end())) {
      return absl::InternalError(absl::StrCat(
          named.name, gradient.defined() ? " has a" : " has no", " gradient"));
    }
    if (!gradient.defined()) continue;
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(gradient, Use::kRead));
    FSDP_RETURN_IF_ERROR(CheckTensor(gradient, OwnPart(named, whole->second),
                                     relative, absolute,
                                     absl::StrCat("gradient of ", named.name)));
  }
  return absl::OkStatus();
}

// Checks that this rank's gradients are the means over ranks of those that
// `plain` has summed.
inline absl::Status CheckMeans(const ShardedModuleBase& model,
                               const torch::nn::Module& plain, int world_size,
                               double relative = 1e-4, double absolute = 1e-6) {
  Gradients means;
  AddShare(plain, world_size, means);
  return CheckOwnGradients(model, means, relative, absolute);
}

// Returns the means over ranks of the gradients of one plain module per rank,
// in storage order; leaves out those that no rank has.
template <typename Net>
Gradients PlainGradients(const std::function<std::shared_ptr<Net>()>& make_net,
                         const LossOf& loss, int world_size) {
  Gradients result;
  for (int rank = 0; rank < world_size; ++rank) {
    std::shared_ptr<Net> plain = make_net();
    loss([&](const at::Tensor& x) -> at::Tensor {
      return plain->forward(InputOf(rank, x));
    }).backward();
    AddShare(*plain, world_size, result);
  }
  return result;
}

// Makes modules with `make_net` and runs them with `loss`. Checks that
// gradients equal the mean of those of plain modules, and that the same names
// have one.
template <typename Net>
absl::Status CheckGradients(
    Communicator& world, const Options& options,
    const std::function<std::shared_ptr<Net>()>& make_net, const LossOf& loss) {
  const Gradients expected =
      PlainGradients<Net>(make_net, loss, world.world_size());
  FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<Net> model,
                        FullyShard(make_net(), Unowned(world), options));
  FSDP_RETURN_IF_ERROR(model->Backward(loss([&](const at::Tensor& x) {
    return model->forward(InputOf(world.rank(), x));
  })));
  FSDP_RETURN_IF_ERROR(CheckOwnGradients(*model, expected));
  return CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                   "bytes of parameters after backward");
}

template <typename Net>
void ExpectSameGradients(const std::function<std::shared_ptr<Net>()>& make_net,
                         const LossOf& loss, const Options& options) {
  for (int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(world_size,
                          [&](Communicator& world) {
                            return CheckGradients<Net>(world, options, make_net,
                                                       loss);
                          }))
        << world_size << " ranks";
  }
}

inline at::Tensor SquareLoss(const Forwarding& forward) {
  return forward(Rows(0, 3, kDim)).square().mean();
}

// Three layers. A test may give their forward.
class Mlp : public torch::nn::Module {
 public:
  using Body = std::function<at::Tensor(Mlp& net, const at::Tensor& x)>;

  explicit Mlp(Body given = nullptr)
      : first(register_module("first", Linear(kDim, kDim))),
        second(register_module("second", Linear(kDim, kDim))),
        third(register_module("third", Linear(kDim, kDim))),
        body(std::move(given)) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (body) return body(*this, x);
    return third->forward(second->forward(first->forward(x).tanh()).tanh());
  }
  Linear first, second, third;
  Body body;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_GRADIENT_CHECK_H_
