// Frozen byte parameters are gathered as they are, in whatever dtype the rest
// computes, and are never trained.
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include "comm/quantized/quantization_log.h"
#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

// Computes linear(x) + x W^T, where W is the bytes as numbers from -1 to 1.
class MixedImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    return linear->forward(x) +
           x.matmul((bytes.to(x.scalar_type()) / 128 - 1).t());
  }
  Linear linear = register_module("linear", Linear(kDim, kDim));
  at::Tensor bytes =
      register_parameter("bytes", at::zeros({kDim, kDim}, at::kByte),
                         /*requires_grad=*/false);
};

class NetImpl : public torch::nn::Module {
 public:
  NetImpl()
      : first(register_module("first", std::make_shared<MixedImpl>())),
        second(register_module("second", std::make_shared<MixedImpl>())) {}
  at::Tensor forward(const at::Tensor& x) {
    return Forward(second, Forward(first, x).tanh());
  }
  std::shared_ptr<MixedImpl> first, second;
};

at::Tensor Bytes(int64_t first) {
  return (at::arange(kDim * kDim) * 37 + first).remainder(256).to(at::kByte);
}

std::shared_ptr<NetImpl> MakeNet() {
  auto net = Filled<NetImpl>();
  net->first->bytes.copy_(Bytes(1).view({kDim, kDim}));
  net->second->bytes.copy_(Bytes(90).view({kDim, kDim}));
  return net;
}

Options Units() { return UnitsOf<MixedImpl>(); }

TEST(ByteParametersTest, GradientsAreThoseOfThePlainModel) {
  ExpectSameGradients<NetImpl>(MakeNet, SquareLoss, Units());
  Options transparent = Units();
  transparent.transparent = true;
  ExpectSameGradients<NetImpl>(MakeNet, SquareLoss, transparent);
  Options away = Units();
  away.offload.parameters = Tier::kSsd;
  away.offload.optimizer = Tier::kSsd;
  away.offload.directory = ::testing::TempDir();
  ExpectSameGradients<NetImpl>(MakeNet, SquareLoss, away);
}

absl::Status ExpectBytes(FullyShardedDataParallel<NetImpl>& model) {
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
  EXPECT_TRUE(at::equal(dict["first.bytes"].flatten(), Bytes(1)));
  EXPECT_TRUE(at::equal(dict["second.bytes"].flatten(), Bytes(90)));
  return absl::OkStatus();
}

// Checks trainings with all parameters in the optimizer, which leaves the bytes
// alone.
absl::Status TrainsAlike(Communicator& world, ShardingStrategy strategy) {
  Options options = Units();
  options.unit.strategy = strategy;
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
  TrainingTask task = ToyTask(kDim);
  task.optimizer = Sgd(0.1, /*weight_decay=*/0.01);
  task.steps = 3;
  task.before_step = [](const NamedTensors& named) {
    for (const auto& [name, values] : named) {
      const bool is_bytes = absl::EndsWith(name, "bytes");
      EXPECT_NE(values.requires_grad(), is_bytes) << name;
      EXPECT_NE(values.grad().defined(), is_bytes) << name;
    }
  };
  return CheckTask<NetImpl>(task, MakeNet, mesh, options);
}

TEST(ByteParametersTest, EveryStrategyAndNumberOfRanks) {
  for (const ShardingStrategy strategy : kStrategies) {
    for (const int ranks : {1, 2, 3, 4, 5}) {
      EXPECT_OK(RunAllRanks(
          ranks,
          [&](Communicator& world) { return TrainsAlike(world, strategy); }))
          << ToString(strategy) << ", " << ranks << " ranks";
    }
  }
}

// Mixed precision and quantized gathers leave the bytes alone.
TEST(ByteParametersTest, BytesAreNotCast) {
  const auto run = [](Communicator& world) -> absl::Status {
    Options options = Units();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.quantize.gather = true;
    options.quantize.min_bytes = 0;
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeNet(), Unowned(world), options));
    FSDP_ASSIGN_OR_RETURN(auto handle, Unshard(*model->module()->first));
    FSDP_RETURN_IF_ERROR(handle.Wait());
    EXPECT_EQ(model->module()->first->linear->weight.scalar_type(),
              at::kBFloat16);
    EXPECT_TRUE(at::equal(model->module()->first->bytes.flatten(), Bytes(1)));
    FSDP_RETURN_IF_ERROR(Reshard(*model->module()->first));
    FSDP_RETURN_IF_ERROR(
        model->Backward(model->forward(Rows(0, 3, kDim)).square().mean()));
    return ExpectBytes(model);
  };
  for (const int ranks : {1, 2, 3}) EXPECT_OK(RunAllRanks(ranks, run));
}

// Passes floating-point numbers unchanged, and notes whether it saw anything
// else.
class SeesDtypes final : public comm::GatherExtension {
 public:
  std::string ToString() const override { return "as they are"; }
  int64_t MessageBytes(int64_t numel, at::ScalarType dtype,
                       int /*world_size*/) const override {
    EXPECT_EQ(dtype, at::kFloat);
    return numel * 4;
  }
  void Write(absl::string_view /*label*/, const at::Tensor& numbers,
             const at::Tensor& message) override {
    message.copy_(numbers.view(at::kByte));
  }
  void Read(absl::string_view /*label*/, const at::Tensor& messages,
            const at::Tensor& numbers) override {
    numbers.copy_(messages.view(at::kFloat));
  }
};

TEST(ByteParametersTest, ExtensionsOfGathersDoNotSeeThem) {
  Options options = Units();
  options.quantize.gather = true;
  options.quantize.gather_extension = std::make_shared<SeesDtypes>();
  ExpectSameGradients<NetImpl>(MakeNet, SquareLoss, options);
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeNet(), Unowned(world), options));
    EXPECT_GT(model->PlanMemory().messages, 0);
    return absl::OkStatus();
  }));
}

TEST(ByteParametersTest, StateDictsTakeBytesAlone) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(Filled<NetImpl>(), Unowned(world), Units()));
    StateDict dict;
    for (const auto& item : MakeNet()->named_parameters()) {
      dict.insert(item.key(), item.value().detach());
    }
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
    FSDP_RETURN_IF_ERROR(ExpectBytes(model));
    const auto refuses = StatusIs(Code::kInvalidArgument,
                                  HasSubstr("dtype Long instead of Byte"));
    dict["second.bytes"] = dict["second.bytes"].to(at::kLong);
    EXPECT_THAT(model->LoadStateDict(dict), refuses);
    FSDP_ASSIGN_OR_RETURN(auto pieces, model->MakeShardedStateDict());
    FSDP_RETURN_IF_ERROR(
        model->LoadShardedStateDict(pieces.parameters, pieces.others));
    for (TensorRange& piece : pieces.parameters) {
      if (piece.values.scalar_type() != at::kByte) continue;
      piece.values = piece.values.to(at::kLong);
    }
    EXPECT_THAT(model->LoadShardedStateDict(pieces.parameters, pieces.others),
                refuses);
    return ExpectBytes(model);
  }));
}

TEST(ByteParametersTest, OtherIntegersAreRefused) {
  for (const c10::ScalarType dtype :
       {at::kChar, at::kLong, at::kBool, at::kComplexFloat}) {
    const auto shard = [dtype](Communicator& world) {
      Linear linear(2, 2);
      linear->register_parameter("numbers", at::zeros({3}, dtype),
                                 /*requires_grad=*/false);
      return FullyShard(linear, Unowned(world)).status();
    };
    EXPECT_THAT(RunRanks(2, shard),
                AllRefuse(absl::StrCat("parameter numbers has dtype ",
                                       c10::toString(dtype)),
                          Code::kInvalidArgument));
  }
}

}  // namespace
}  // namespace fsdp::testing
