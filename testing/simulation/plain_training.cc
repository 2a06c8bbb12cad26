#include "testing/simulation/plain_training.h"

#include <ATen/ops/equal.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::simulation {
namespace {

using Tensors = std::vector<at::Tensor>;

void AddTo(Tensors& sums, const Tensors& more) {
  if (sums.empty()) sums.resize(more.size());
  for (size_t i = 0; i < more.size(); ++i) {
    sums[i] = sums[i].defined() ? sums[i] + more[i] : more[i];
  }
}

void Scale(Tensors& tensors, double factor) {
  for (at::Tensor& tensor : tensors) tensor = tensor * factor;
}

}  // namespace

PlainTraining::PlainTraining(const Training& training,
                             const NetworkOptions& network,
                             std::vector<int> world_sizes)
    : t_(training),
      network_(network),
      world_sizes_(std::move(world_sizes)),
      net_(fsdp::testing::MakeNet(t_.dim, t_.blocks)),
      master_(fsdp::testing::MakeNet(t_.dim, t_.blocks)) {
  fsdp::testing::FillParameters(*master_, /*seed=*/3);
  if (t_.bfloat16) net_->to(at::kBFloat16);
  optimizer_ = MakeOptimizer(t_, master_->parameters());
  NoteValues();
}

void PlainTraining::NoteValues() {
  Values& values = values_.emplace_back();
  for (const auto& item : master_->named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
}

std::vector<std::vector<float>> PlainTraining::Step(int step) {
  const torch::NoGradGuard no_grad;
  const int world_size = world_sizes_[step];
  const Tensors compute = net_->parameters();
  Tensors master = master_->parameters();
  for (size_t i = 0; i < master.size(); ++i) {
    at::Tensor(compute[i]).copy_(master[i]);
  }
  std::vector<std::vector<float>> losses(t_.backwards);
  std::vector<Tensors> whole(world_size);  // under NoSync, by rank
  Tensors gradients;
  for (int i = 0; i < t_.backwards; ++i) {
    for (int rank = 0; rank < world_size; ++rank) {
      float loss = 0;
      const Tensors mine = Backward(step, i, rank, world_size, &loss);
      losses[i].push_back(loss);
      if (!t_.no_sync) whole[rank].clear();
      AddTo(whole[rank], mine);
    }
    if (t_.no_sync && i + 1 < t_.backwards) continue;
    AddTo(gradients, Mean(whole));
  }
  for (size_t i = 0; i < master.size(); ++i) {
    master[i].mutable_grad() = gradients[i];
  }
  optimizer_->step();
  return losses;
}

// Computes in float32, for one rank.
Tensors PlainTraining::Backward(int step, int backward, int rank,
                                int world_size, float* loss_value) {
  const at::AutoGradMode with_grad(true);
  const at::Tensor x = DataOf(t_, step, backward, rank, world_size);
  const at::Tensor in = t_.bfloat16 ? x.to(at::kBFloat16) : x;
  const at::Tensor loss =
      fsdp::testing::Loss(net_->forward(in).to(at::kFloat), x) / t_.backwards;
  *loss_value = loss.item<float>();
  net_->zero_grad();
  loss.backward();
  Tensors gradients;
  for (const at::Tensor& parameter : net_->parameters()) {
    gradients.push_back(parameter.grad().to(at::kFloat).clone());
  }
  return gradients;
}

Tensors PlainTraining::Mean(const std::vector<Tensors>& by_rank) const {
  const auto world_size = static_cast<int>(by_rank.size());
  const double divisor = t_.divide == 0 ? world_size : t_.divide;
  const int row = world_size / t_.mesh_rows;
  Tensors sums;
  for (int begin = 0; begin < world_size; begin += row) {
    Tensors row_sums;
    for (int rank = begin; rank < begin + row; ++rank) {
      Tensors scaled = by_rank[rank];
      if (network_.prefers_scaled_inputs) Scale(scaled, 1 / divisor);
      AddTo(row_sums, scaled);
    }
    AddTo(sums, row_sums);
  }
  if (!network_.prefers_scaled_inputs) Scale(sums, 1 / divisor);
  return sums;
}

float PlainTraining::Loss(int64_t step, int backward, int rank) {
  ValuesAfter(step + 1);
  return losses_[step][backward][rank];
}

const Values& PlainTraining::ValuesAfter(int64_t steps) {
  while (static_cast<int64_t>(losses_.size()) < steps) {
    losses_.push_back(Step(static_cast<int>(losses_.size())));
    NoteValues();
  }
  return values_[steps];
}

at::Tensor DataOf(const Training& training, int step, int backward, int rank,
                  int world_size) {
  const int64_t part =
      int64_t{step * training.backwards + backward} * world_size + rank;
  return fsdp::testing::Rows(part * training.rows, training.rows, training.dim);
}

std::string FirstDifference(const Values& actual, const Values& expected) {
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) return absl::StrCat("there is no ", name);
    const at::Tensor& other = found->second;
    if (other.scalar_type() != value.scalar_type() ||
        !at::equal(other, value)) {
      return absl::StrCat(name, " is off by ",
                          (other.to(at::kDouble) - value.to(at::kDouble))
                              .abs()
                              .max()
                              .item<double>());
    }
  }
  return actual.size() == expected.size() ? "" : "there is too much";
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const Training& training, std::vector<at::Tensor> parameters) {
  if (training.optimizer == Optimizer::kSgd) {
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    if (training.fused) {
      return std::make_unique<FusedSGD>(std::move(parameters), options);
    }
    return std::make_unique<torch::optim::SGD>(std::move(parameters), options);
  }
  const auto options = torch::optim::AdamWOptions(0.01);
  if (training.fused) {
    return std::make_unique<FusedAdamW>(std::move(parameters), options);
  }
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), options);
}

}  // namespace fsdp::simulation
