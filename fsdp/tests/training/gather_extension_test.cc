// Training whose parameters are gathered by the user's own extension.
#include <torch/optim/sgd.h>

#include "comm/quantized/quantization_log.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 8;
constexpr int kBlocks = 2;
constexpr int kSteps = 3;
constexpr double kRate = 0.1;

// Sends numbers as int16, in steps of 1/64.
class FixedPoint : public comm::GatherExtension {
 public:
  explicit FixedPoint(std::string name = "fixed point")
      : name_(std::move(name)) {}

  static at::Tensor Rounded(const at::Tensor& numbers) {
    return numbers.mul(64).round().div(64);
  }
  std::string ToString() const override { return name_; }
  int64_t MessageBytes(int64_t numel, at::ScalarType, int) const override {
    return 2 * numel;
  }
  void Write(absl::string_view label, const at::Tensor& numbers,
             const at::Tensor& message) override {
    labels.push_back(std::string(label));
    message.view(at::kShort).copy_(numbers.mul(64).round());
  }
  void Read(absl::string_view, const at::Tensor& messages,
            const at::Tensor& numbers) override {
    numbers.copy_(messages.view(at::kShort)).div_(64);
  }
  std::vector<std::string> labels;

 private:
  const std::string name_;
};

Options Extended(std::shared_ptr<FixedPoint> extension) {
  Options options = BlockUnits();
  options.quantize.gather = true;
  options.quantize.gather_extension = std::move(extension);
  return options;
}

at::Tensor RowsOf(int step, int rank, int ranks) {
  return Rows(int64_t{3} * (step * ranks + rank), 3, kDim);
}

// Trains with plain LibTorch: computes with rounded parameters and steps exact
// ones.
std::shared_ptr<NetImpl> TrainPlain(int ranks) {
  std::shared_ptr<NetImpl> exact = MakeNet(kDim, kBlocks);
  const std::shared_ptr<NetImpl> rounded = MakeNet(kDim, kBlocks);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> from = exact->parameters();
    std::vector<at::Tensor> to = rounded->parameters();
    {
      const c10::NoGradGuard no_grad;
      for (size_t i = 0; i < from.size(); ++i) {
        to[i].copy_(FixedPoint::Rounded(from[i]));
      }
    }
    rounded->zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      const at::Tensor x = RowsOf(step, rank, ranks);
      (Loss(rounded->forward(x), x) / ranks).backward();
    }
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) {
      from[i].sub_(to[i].grad(), kRate);
    }
  }
  return exact;
}

TEST(GatherExtensionTrainingTest, ComputesWithWhatItReadsAndStepsExactShards) {
  constexpr int kRanks = 3;
  const std::shared_ptr<NetImpl> plain = TrainPlain(kRanks);
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    const auto extension = std::make_shared<FixedPoint>();
    CollectiveLog log;
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> own,
                          world.Split(0, world.rank()));
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeNet(kDim, kBlocks),
                                     std::shared_ptr<Communicator>(
                                         comm::Record(std::move(own), &log)),
                                     Extended(extension)));
    log.Clear();
    torch::optim::SGD optimizer(model->Parameters(),
                                torch::optim::SGDOptions(kRate));
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor x = RowsOf(step, world.rank(), kRanks);
      optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      optimizer.step();
    }
    for (const auto& record : log.Trace()) {
      if (record.collective != Collective::kAllGather) continue;
      int64_t whole = 0;
      for (int unit = 0; unit < model->sharded_model().num_units(); ++unit) {
        if (model->sharded_model().unit_name(unit) != record.label) continue;
        whole = model->sharded_model().flats(unit)[0]->unsharded_bytes();
      }
      EXPECT_EQ(2 * record.bytes, whole) << record.label;
    }
    const std::vector<std::string>& labels = extension->labels;
    EXPECT_EQ(labels.empty() ? "none" : labels.front(), "root");
    const auto expected = plain->named_parameters();
    for (const TensorRange& named : model->Ranges()) {
      FSDP_RETURN_IF_ERROR(CheckTensor(named.values,
                                       OwnPart(named, expected[named.name]),
                                       1e-5, 1e-6, named.name));
    }
    return absl::OkStatus();
  }));
}

TEST(GatherExtensionTrainingTest, RanksThatHaveOthersOrNoUseAreRefused) {
  for (const bool gather : {false, true}) {
    const auto shard = [gather](Communicator& world) {
      Options options = Extended(
          std::make_shared<FixedPoint>(absl::StrCat("of rank ", world.rank())));
      options.quantize.gather = gather;
      return FullyShard(MakeNet(kDim, 1), Unowned(world), options).status();
    };
    EXPECT_THAT(
        RunRanks(2, shard),
        Each(StatusIs(absl::StatusCode::kInvalidArgument,
                      HasSubstr(gather ? "of rank 1" : "`gather` is false"))));
  }
}

}  // namespace
}  // namespace fsdp::testing
