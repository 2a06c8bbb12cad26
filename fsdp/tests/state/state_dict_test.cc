#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize.h>

#include <filesystem>
#include <mutex>

#include "base/files/testing/real_files.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;

// Has a parameter of each kind: tied across units, frozen, transposed, a
// scalar, empty, in double; and buffers.
class InnerImpl : public torch::nn::Module {
 public:
  explicit InnerImpl(const at::Tensor& tied)
      : same(register_parameter("same", tied)),
        norm(register_module("norm", torch::nn::BatchNorm1d(3))),
        transposed(
            register_parameter("transposed", at::zeros({5, 3}).t().detach())) {}
  at::Tensor same;
  torch::nn::BatchNorm1d norm;
  at::Tensor transposed;
};

class VariedImpl : public torch::nn::Module {
 public:
  VariedImpl()
      : linear(register_module("linear", Linear(3, 7))),
        scalar(register_parameter("scalar", at::zeros({}))),
        empty(register_parameter("empty", at::zeros({0, 3}))),
        in_double(
            register_parameter("in_double", at::zeros({11}, at::kDouble))),
        inner(register_module("inner",
                              std::make_shared<InnerImpl>(linear->weight))) {
    FillParameters(*this, 3);
    linear->bias.set_requires_grad(false);
    inner->norm->running_mean.fill_(0.25);
  }
  Linear linear;
  at::Tensor scalar, empty, in_double;
  std::shared_ptr<InnerImpl> inner;
  at::Tensor forward(const at::Tensor& x) { return x; }
};

Options VariedOptions(
    ShardingStrategy strategy = ShardingStrategy::kFullShard) {
  Options options = UnitsOf<InnerImpl>();
  options.unit.strategy = strategy;
  return options;
}

using Model = FullyShardedDataParallel<VariedImpl>;

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const Options& options = VariedOptions()) {
  return FullyShard(std::make_shared<VariedImpl>(), Unowned(world), options);
}

StateDict PlainDict(const torch::nn::Module& module) {
  StateDict dict;
  for (const auto& item : module.named_parameters()) {
    dict.insert(item.key(), item.value().detach().clone());
  }
  for (const auto& item : module.named_buffers()) {
    dict.insert(item.key(), item.value().clone());
  }
  return dict;
}

// Returns a state dict in which every value is changed.
StateDict Changed(double by) {
  StateDict dict = PlainDict(VariedImpl());
  for (auto& item : dict) {
    if (item.key() == "inner.same" || !item.value().is_floating_point()) {
      continue;
    }
    item.value().add_(by);
  }
  dict["inner.same"] = dict["linear.weight"];
  return dict;
}

absl::Status CheckSame(const StateDict& actual, const StateDict& expected) {
  EXPECT_EQ(actual.keys(), expected.keys());
  for (const auto& item : expected) {
    const at::Tensor& value = actual[item.key()];
    if (value.dtype() != item.value().dtype() ||
        value.sizes() != item.value().sizes() ||
        !at::equal(value, item.value())) {
      return absl::InternalError(absl::StrCat(item.key(), " differs"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHas(const Model& model, const StateDict& expected) {
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
  return CheckSame(dict, expected);
}

// --- Whole -------------------------------------------------------------------

class WorldTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, WorldTest, ::testing::Values(1, 2, 3, 5));

TEST_P(WorldTest, FullDictIsThatOfTheUnwrappedModuleTwiceInARow) {
  const StateDict expected = PlainDict(VariedImpl());
  EXPECT_OK(RunAllRanks(GetParam(), [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    for (int i = 0; i < 2; ++i) {
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      FSDP_RETURN_IF_ERROR(CheckSame(dict, expected));
      EXPECT_TRUE(dict["inner.transposed"].strides() ==
                  expected["inner.transposed"].strides())
          << "strides";
      EXPECT_TRUE(dict["inner.same"].is_same(dict["linear.weight"]))
          << "untied";
      // The values are copies.
      dict["scalar"].fill_(17);
    }
    return absl::OkStatus();
  }));
}

TEST_P(WorldTest, WhatIsLoadedIsWhatIsThere) {
  const StateDict expected = Changed(0.5);
  for (const bool rank0_only : {false, true}) {
    EXPECT_OK(RunAllRanks(GetParam(), [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      LoadOptions options;
      options.rank0_only = rank0_only;
      const bool has_dict = !rank0_only || world.rank() == 0;
      FSDP_RETURN_IF_ERROR(
          model->LoadStateDict(has_dict ? expected : StateDict(), options));
      return CheckHas(model, expected);
    }));
  }
}

TEST(FullStateDictTest, OnRank0OnlyAndInHostMemory) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    StateDictOptions options;
    options.rank0_only = true;
    options.offload_to_cpu = true;
    FSDP_ASSIGN_OR_RETURN(const auto dict, model->GatherStateDict(options));
    return world.rank() == 0 ? CheckSame(dict, PlainDict(VariedImpl()))
                             : Check(dict.is_empty(), "not empty");
  }));
}

TEST(FullStateDictTest, IsInTheOriginalDtypesForEveryStrategy) {
  const StateDict expected = PlainDict(VariedImpl());
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard,
        ShardingStrategy::kHybridShard}) {
    EXPECT_OK(RunAllRanks(4, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
      Options options = VariedOptions(strategy);
      options.unit.precision = ComputeIn(at::kBFloat16);
      options.unit.precision.buffer_dtype = at::kBFloat16;
      options.unit.precision.keep_full_precision =
          [](const torch::nn::Module&) { return false; };
      FSDP_ASSIGN_OR_RETURN(
          Model model,
          FullyShard(std::make_shared<VariedImpl>(), mesh, options));
      FSDP_RETURN_IF_ERROR(CheckHas(model, expected));
      // Loading goes back into bf16 buffers.
      FSDP_RETURN_IF_ERROR(model->LoadStateDict(Changed(1)));
      FSDP_RETURN_IF_ERROR(CheckHas(model, Changed(1)));
      // A scope shows parameters as stored, and leaves buffers as they are.
      FSDP_ASSIGN_OR_RETURN(const auto full, model->SummonFullParams());
      EXPECT_EQ(model.module()->linear->weight.scalar_type(), at::kFloat);
      return Check(model.module()->inner->norm->running_mean.scalar_type() ==
                       at::kBFloat16,
                   "dtype of a buffer");
    }));
  }
}

TEST(FullStateDictTest, HasIgnoredParametersAsTheyAre) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = VariedOptions();
    options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
      return name == "in_double";
    };
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, options));
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
    EXPECT_TRUE(at::equal(dict["in_double"], VariedImpl().in_double))
        << "value";
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(Changed(2)));
    return Check(at::equal(model.module()->in_double, Changed(2)["in_double"]),
                 "not loaded");
  }));
}

TEST(LoadStateDictTest, ListsAllDifferencesOnAllRanksAndChangesNothing) {
  StateDict wrong = PlainDict(VariedImpl());
  wrong["linear.bias"] = at::zeros({8});
  wrong["scalar"] = at::zeros({}, at::kLong);
  wrong["in_double"] = at::zeros({11}, at::kMeta);
  wrong["inner.norm.num_batches_tracked"] = at::zeros({}, at::kComplexFloat);
  StateDict renamed;
  for (const auto& item : wrong) {
    renamed.insert(item.key() == "empty" ? "strange" : item.key(),
                   item.value());
  }
  for (const bool rank0_only : {false, true}) {
    const auto run = [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
      LoadOptions options;
      options.rank0_only = rank0_only;
      const bool has_dict = !rank0_only || world.rank() == 0;
      StateDict dict = has_dict ? renamed : StateDict();
      if (has_dict) dict["linear.weight"] = model.module()->linear->weight;
      absl::Status refused = model->LoadStateDict(dict, options);
      FSDP_RETURN_IF_ERROR(CheckHas(model, PlainDict(VariedImpl())));
      return refused;
    };
    EXPECT_THAT(RunRefusedRanks(2, run),
                Each(StatusIs(Code::kInvalidArgument,
                              AllOf(HasSubstr("linear.bias: shape [8] instead "
                                              "of [7]"),
                                    HasSubstr("scalar: dtype Long"),
                                    HasSubstr("in_double: a tensor on meta"),
                                    HasSubstr("linear.weight: its values: "),
                                    HasSubstr("tracked: dtype ComplexFloat"),
                                    HasSubstr("missing: empty"),
                                    HasSubstr("unexpected: strange")))));
  }
}

TEST(LoadStateDictTest, NotStrictTakesWhatFits) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    StateDict some;
    some.insert("scalar", at::ones({}));
    some.insert("strange", at::ones({}));
    LoadOptions options;
    options.strict = false;
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(some, options));
    StateDict expected = PlainDict(VariedImpl());
    expected["scalar"] = at::ones({});
    return CheckHas(model, expected);
  }));
}

TEST(LoadStateDictTest, OneNameOfATiedParameterIsEnough) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    StateDict dict;
    for (const auto& item : Changed(3)) {
      if (item.key() != "linear.weight") dict.insert(item.key(), item.value());
    }
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
    return CheckHas(model, Changed(3));
  }));
}

TEST(StateDictTest, OptionsThatDifferBetweenRanksAreRefusedByAll) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
    LoadOptions options;
    options.rank0_only = world.rank() == 0;
    return model->LoadStateDict(dict, options);
  };
  EXPECT_THAT(RunRanks(3, run), AllRefuse("the options of LoadStateDict()",
                                          Code::kInvalidArgument));
}

// --- Pieces ------------------------------------------------------------------

struct AllPieces {
  std::vector<TensorRange> pieces;
  StateDict others;
};

AllPieces PiecesOf(int world_size, double change) {
  std::mutex mutex;
  AllPieces all;
  EXPECT_OK(RunAllRanks(world_size, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(Changed(change)));
    FSDP_ASSIGN_OR_RETURN(ShardedStateDict dict, model->MakeShardedStateDict());
    const std::lock_guard<std::mutex> lock(mutex);
    for (TensorRange& piece : dict.parameters) {
      all.pieces.push_back(std::move(piece));
    }
    all.others = dict.others;
    return absl::OkStatus();
  }));
  return all;
}

TEST(ShardedStateDictTest, MovesBetweenNumbersOfRanks) {
  for (const auto& [from, to] :
       std::vector<std::pair<int, int>>{{3, 2}, {2, 5}, {5, 1}, {1, 3}}) {
    const AllPieces all = PiecesOf(from, from);
    EXPECT_OK(
        RunAllRanks(to, [&, from = from](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
          FSDP_RETURN_IF_ERROR(
              model->LoadShardedStateDict(all.pieces, all.others));
          return CheckHas(model, Changed(from));
        }));
  }
}

TEST(ShardedStateDictTest, GapsAndOtherShapesAreRefusedOnAllRanks) {
  AllPieces all = PiecesOf(2, 1);
  std::vector<TensorRange> some;
  for (TensorRange& piece : all.pieces) {
    if (piece.name == "linear.weight" && piece.begin > 0) continue;
    if (piece.name == "in_double") piece.sizes = {12};
    some.push_back(piece);
  }
  some.push_back(some.front());
  some.back().name = "stranger.weight";
  const auto run = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    return model->LoadShardedStateDict(some, all.others);
  };
  EXPECT_THAT(RunRanks(1, run),
              Each(StatusIs(Code::kInvalidArgument,
                            AllOf(HasSubstr("linear.weight: no piece has"),
                                  HasSubstr("in_double: shape [12]"),
                                  HasSubstr("unexpected: stranger")))));
  EXPECT_THAT(RunRanks(3, run),
              AllRefuse("does not fit", Code::kInvalidArgument));
}

// --- torch::save -------------------------------------------------------------

int NumFiles(const std::filesystem::path& folder) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    count += entry.exists();
  }
  return count;
}

TEST_P(WorldTest, Rank0AloneWritesAFileForPlainAndShardedModules) {
  const std::filesystem::path folder =
      EmptyFolder(absl::StrCat("save_", GetParam()));
  const StateDict expected = Changed(2);
  EXPECT_OK(RunAllRanks(GetParam(), [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(model->LoadStateDict(expected));
    // If another rank wrote, its file would exist.
    torch::save(model, (folder / std::to_string(world.rank())).string());
    FSDP_ASSIGN_OR_RETURN(Model other, MakeModel(world));
    torch::load(other, (folder / "0").string());
    return CheckHas(other, expected);
  }));
  EXPECT_EQ(NumFiles(folder), 1);
  auto plain = std::make_shared<VariedImpl>();
  torch::load(plain, (folder / "0").string());
  EXPECT_OK(CheckSame(PlainDict(*plain), expected));
}

TEST(SaveTest, WhatRank0CannotWriteAllRanksAreTold) {
  const std::filesystem::path folder = EmptyFolder("save_refused");
  const std::string path = (folder / "missing" / "model.pt").string();
  const auto run = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    absl::Status refused =
        TorchToStatus("saving", [&] { torch::save(model, path); });
    FSDP_RETURN_IF_ERROR(CheckHas(model, PlainDict(VariedImpl())));
    return refused;
  };
  EXPECT_THAT(RunRefusedRanks(3, run), AllRefuse(path, Code::kNotFound));
  EXPECT_EQ(NumFiles(folder), 0);
}

TEST(SaveTest, AFailureLeavesNothingBehind) {
  const std::filesystem::path folder = EmptyFolder("save_into_folder");
  std::filesystem::create_directory(folder / "model.pt");
  const auto run = [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    return model->Save((folder / "model.pt").string());
  };
  EXPECT_THAT(RunRanks(2, run), Each(::testing::Not(IsOk())));
  EXPECT_EQ(NumFiles(folder), 1);
  EXPECT_TRUE(std::filesystem::is_directory(folder / "model.pt"));
}

}  // namespace
}  // namespace fsdp::testing
