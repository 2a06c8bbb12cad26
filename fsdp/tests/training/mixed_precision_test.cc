#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/normalization.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 5;
using Dtypes = std::map<std::string, at::ScalarType>;

// A unit that notes what it is run with.
class ProbeImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    seen["input"] = x.scalar_type();
    seen["parameter"] = linear->weight.scalar_type();
    seen["norm"] = norm->weight.scalar_type();
    seen["buffer"] = table.scalar_type();
    const at::Tensor y =
        norm->forward(linear->forward(x.to(linear->weight.scalar_type())));
    return x + y + table;
  }

  Linear linear = register_module("linear", Linear(kDim, kDim));
  torch::nn::LayerNorm norm = register_module(
      "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
  at::Tensor table = register_buffer("table", at::zeros({kDim}));
  Dtypes seen;
};

class ProbedNet : public torch::nn::Module {
 public:
  ProbedNet() { FillParameters(*this, 0); }
  at::Tensor forward(const at::Tensor& x) {
    input = x.scalar_type();
    const at::Tensor y = Forward(inner, x);
    return head->forward(y.to(head->weight.scalar_type()));
  }
  std::shared_ptr<ProbeImpl> inner =
      register_module("inner", std::make_shared<ProbeImpl>());
  Linear head = register_module("head", Linear(kDim, kDim));
  at::ScalarType input = at::kFloat;
};

Options Probed(const MixedPrecision& precision) {
  Options options = UnitsOf<ProbeImpl>();
  options.unit.precision = precision;
  return options;
}

struct DtypesCase {
  const char* name;
  MixedPrecision precision;
  Dtypes inside;  // of the inner unit, but "root" is the root's input
  at::ScalarType output;
  at::ScalarType gradient;
  // If set, changes that of the inner unit.
  std::function<void(MixedPrecision&)> inner = nullptr;
};

MixedPrecision Reduced(at::ScalarType param, at::ScalarType reduce) {
  MixedPrecision precision = ComputeIn(param);
  precision.reduce_dtype = reduce;
  return precision;
}

MixedPrecision With(MixedPrecision precision,
                    const std::function<void(MixedPrecision&)>& change) {
  change(precision);
  return precision;
}

Dtypes Inside(at::ScalarType input, at::ScalarType parameter,
              at::ScalarType norm, at::ScalarType buffer) {
  return {{"input", input},
          {"parameter", parameter},
          {"norm", norm},
          {"buffer", buffer}};
}

class DtypesTest : public ::testing::TestWithParam<DtypesCase> {};

TEST_P(DtypesTest, AreThoseOfThePolicy) {
  const DtypesCase& c = GetParam();
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    auto net = std::make_shared<ProbedNet>();
    Options options = Probed(c.precision);
    options.configure_unit = [&c](const std::string& path,
                                  const torch::nn::Module&, UnitOptions& unit) {
      if (path == "inner" && c.inner) c.inner(unit.precision);
    };
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    at::Tensor x = Rows(world.rank(), 3, kDim);
    x.set_requires_grad(true);
    const at::Tensor output = model->forward(x);
    net->inner->seen["root"] = net->input;
    for (const auto& [what, dtype] : c.inside) {
      EXPECT_EQ(net->inner->seen[what], dtype) << what;
    }
    EXPECT_EQ(output.scalar_type(), c.output);
    FSDP_RETURN_IF_ERROR(model->Backward(output.to(at::kFloat).square().sum()));
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    for (const TensorRange& named : model->Ranges()) {
      EXPECT_EQ(named.values.scalar_type(), at::kFloat)
          << "shard of " << named.name;
      EXPECT_EQ(named.values.grad().scalar_type(), c.gradient)
          << "gradient of " << named.name;
    }
    return absl::OkStatus();
  }));
}

constexpr at::ScalarType kF32 = at::kFloat;
constexpr at::ScalarType kB16 = at::kBFloat16;
constexpr at::ScalarType kF16 = at::kHalf;

INSTANTIATE_TEST_SUITE_P(
    All, DtypesTest,
    ::testing::Values(
        DtypesCase{"Default", MixedPrecision(), Inside(kF32, kF32, kF32, kF32),
                   kF32, kF32},
        DtypesCase{"Bf16", ComputeIn(kB16), Inside(kB16, kB16, kB16, kF32),
                   kB16, kF32},
        DtypesCase{"Fp16ReducedInFp16", Reduced(kF16, kF16),
                   Inside(kF16, kF16, kF16, kF32), kF16, kF32},
        DtypesCase{
            "KeepLowPrecisionGrads",
            With(Reduced(kB16, kB16),
                 [](MixedPrecision& p) { p.keep_low_precision_grads = true; }),
            Inside(kB16, kB16, kB16, kF32), kB16, kB16},
        DtypesCase{"BufferAndOutput",
                   With(ComputeIn(kB16),
                        [](MixedPrecision& p) {
                          p.buffer_dtype = kB16;
                          p.output_dtype = kF32;
                        }),
                   Inside(kB16, kB16, kB16, kB16), kF32, kF32},
        DtypesCase{"NormsKeepFullPrecision",
                   With(ComputeIn(kB16),
                        [](MixedPrecision& p) {
                          p.keep_full_precision = IsNormalization;
                        }),
                   Inside(kB16, kB16, kF32, kF32), kB16, kF32},
        DtypesCase{
            "InputsAreNotCast",
            With(ComputeIn(kB16),
                 [](MixedPrecision& p) { p.cast_inputs = CastInputs::kNever; }),
            Inside(kF32, kB16, kB16, kF32), kB16, kF32},
        DtypesCase{"ReduceInLessThanIsComputed",
                   With(MixedPrecision(),
                        [](MixedPrecision& p) { p.reduce_dtype = kB16; }),
                   Inside(kF32, kF32, kF32, kF32), kF32, kF32},
        DtypesCase{"UnitsMayDifferAndForceTheirInputs",
                   ComputeIn(kB16),
                   {{"root", kB16}, {"input", kF32}, {"parameter", kF32}},
                   kB16,
                   kF32,
                   [](MixedPrecision& p) {
                     p = MixedPrecision();
                     p.force_input_to_fp32 = true;
                   }},
        DtypesCase{"EveryUnitMayCastItsInputs",
                   With(ComputeIn(kB16),
                        [](MixedPrecision& p) {
                          p.cast_inputs = CastInputs::kEveryUnit;
                        }),
                   {{"root", kB16}, {"input", kF16}},
                   kB16,
                   kF32,
                   [](MixedPrecision& p) { p.param_dtype = kF16; }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(MixedPrecisionTest, HalvesTheBytesOfGathersAndReductions) {
  const auto bytes = [](const MixedPrecision& precision) {
    auto group = *comm::CreateLocalGroup(2);
    CollectiveLog log;
    group[0] = comm::Record(std::move(group[0]), &log);
    EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) {
      auto model = ValueOrThrow(FullyShard(std::make_shared<ProbedNet>(),
                                           Unowned(world), Probed(precision)));
      if (world.rank() == 0) log.Clear();  // the log is that of rank 0
      const at::Tensor y = model->forward(Rows(0, 2, kDim));
      return model->Backward(y.to(at::kFloat).sum());
    })));
    return std::pair<double, double>(
        log.TotalsOf(Collective::kAllGather).bytes,
        log.TotalsOf(Collective::kReduceScatter).bytes);
  };
  const auto full = bytes(MixedPrecision());
  const auto compute = bytes(ComputeIn(at::kBFloat16));
  const auto both = bytes(Reduced(at::kBFloat16, at::kBFloat16));
  EXPECT_NEAR(compute.first / full.first, 0.5, 0.1);
  EXPECT_NEAR(compute.second / full.second, 1, 0.2);
  EXPECT_NEAR(both.second / full.second, 0.5, 0.15);
}

TEST(MixedPrecisionTest, EvalModeMayBeInFullPrecision) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    MixedPrecision precision = ComputeIn(at::kBFloat16);
    precision.full_precision_in_eval = true;
    precision.buffer_dtype = at::kBFloat16;
    auto net = std::make_shared<ProbedNet>();
    const at::Tensor x = Rows(0, 2, kDim);
    const at::Tensor plain = ProbedNet().forward(x);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(net, Unowned(world), Probed(precision)));
    for (int round = 0; round < 2; ++round) {
      model->train();
      const at::Tensor low = model->forward(x);
      EXPECT_EQ(low.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->inner->seen["buffer"], at::kBFloat16);
      model->eval();
      const c10::InferenceMode inference;
      FSDP_RETURN_IF_ERROR(
          CheckTensor(model->forward(x), plain, "outputs in full precision"));
      EXPECT_EQ(net->inner->seen["buffer"], at::kFloat);
      EXPECT_FALSE(net->inner->table.is_inference());
    }
    return absl::OkStatus();
  }));
}

TEST(MixedPrecisionTest, BatchNormKeepsFullPrecisionUnlessToldOtherwise) {
  EXPECT_TRUE(MixedPrecision().Keeps(torch::nn::BatchNorm1dImpl(3)));
  EXPECT_FALSE(MixedPrecision().Keeps(
      torch::nn::LayerNormImpl(torch::nn::LayerNormOptions({3}))));
  MixedPrecision none;
  none.keep_full_precision = [](const torch::nn::Module&) { return false; };
  EXPECT_FALSE(none.Keeps(torch::nn::BatchNorm1dImpl(3)));
}

TEST(MixedPrecisionTest, RefusesWhatContradictsItself) {
  MixedPrecision precision;
  precision.param_dtype = at::kInt;
  EXPECT_THAT(precision.Validate(), StatusIs(Code::kInvalidArgument,
                                             HasSubstr("param_dtype is Int")));
  precision = ComputeIn(at::kBFloat16);
  precision.force_input_to_fp32 = true;
  EXPECT_THAT(precision.Validate(), StatusIs(Code::kInvalidArgument,
                                             HasSubstr("force_input_to_fp32")));
  precision = MixedPrecision();
  precision.cast_inputs = CastInputs::kEveryUnit;
  EXPECT_THAT(precision.Validate(),
              StatusIs(Code::kInvalidArgument, HasSubstr("no param_dtype")));
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    const absl::Status status = FullyShard(std::make_shared<ProbedNet>(),
                                           Unowned(world), Probed(precision))
                                    .status();
    return CheckThat(status, StatusIs(Code::kInvalidArgument, _),
                     "status of FullyShard()");
  }));
}

TEST(MixedPrecisionTest, ReadsAsASentence) {
  EXPECT_EQ(MixedPrecision().ToString(), "as stored");
  EXPECT_EQ(ComputeIn(at::kBFloat16).ToString(),
            "param BFloat16, reduce Float, inputs cast at the root");
}

TEST(MixedPrecisionTest, AnEvalForwardBeforeTheBackwardIsNamed) {
  const auto run = [](Communicator& world) -> absl::Status {
    MixedPrecision precision = ComputeIn(at::kBFloat16);
    precision.full_precision_in_eval = true;
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(std::make_shared<ProbedNet>(), Unowned(world),
                               Probed(precision)));
    const at::Tensor x = Rows(0, 2, kDim);
    const at::Tensor loss = model->forward(x).sum();
    model->eval();
    model->forward(x);
    return model->Backward(loss);
  };
  EXPECT_THAT(RunRanks(2, run), AllRefuse("after a forward in another mode"));
}

TEST(MixedPrecisionTest, SoItIsOfAFrozenUnitThatIsCalledDirectly) {
  const auto run = [](Communicator& world) -> absl::Status {
    const Linear last(kDim, kDim);
    for (at::Tensor& frozen : last->parameters()) {
      frozen.set_requires_grad(false);
    }
    const torch::nn::Functional cast([last](const at::Tensor& x) {
      return x.to(last->weight.scalar_type());
    });
    torch::nn::Sequential net(Linear(kDim, kDim), cast, last);
    Options options = UnitsOf<torch::nn::LinearImpl>();
    options.transparent = true;
    options.configure_unit = [](const std::string& path,
                                const torch::nn::Module&, UnitOptions& unit) {
      if (path != "2") return;  // no other unit refuses
      unit.precision = ComputeIn(at::kBFloat16);
      unit.precision.full_precision_in_eval = true;
    };
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    const at::Tensor x = Rows(0, 2, kDim);
    const at::Tensor loss = model->forward(x).sum();
    model->eval();
    model->forward(x);
    return model->Backward(loss);
  };
  EXPECT_THAT(RunRanks(1, run), AllRefuse("after a forward in another mode"));
}

}  // namespace
}  // namespace fsdp::testing
