// Compares losses and gradient norms with those of PyTorch's FSDP1, FSDP2 and
// DDP with the same models, values and data: testing/pytorch_figures.txt,
// written by tools/record_pytorch_figures.py.

#include <fstream>
#include <limits>
#include <sstream>

#include "fsdp/testing/toy_transformer.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::MeshDimension;

// The counterpart of a case of the script.
struct Case {
  TrainingTask task;
  Options options;
  bool transformer = false;
  bool freeze_ends = false;
  int replicas = 1;
  double tolerance = 1e-5;
};

at::Tensor NetLoss(const TensorFunction& forward, int64_t part) {
  constexpr int64_t kRows = 4;
  const at::Tensor x = Rows(part * kRows, kRows, 7);
  return Loss(forward(x), x);
}

at::Tensor SequencesLoss(const TensorFunction& forward, int64_t part) {
  constexpr int64_t kSequences = 3;
  return TransformerLoss(forward, Sequences(part * kSequences, kSequences));
}

Case NetCase() {
  Case result;
  result.task.loss = NetLoss;
  result.options = BlockUnits();
  return result;
}

Case TransformerCase() {
  Case result;
  result.task.loss = SequencesLoss;
  result.options = LayerUnits();
  result.transformer = true;
  return result;
}

std::map<std::string, Case> Cases() {
  std::map<std::string, Case> cases;
  for (const char* name : {"mlp_sgd", "mlp_adamw", "clip_2", "clip_inf",
                           "no_sync", "bf16", "frozen", "hybrid"}) {
    cases[name] = NetCase();
  }
  for (const char* name :
       {"transformer_sgd", "transformer_adamw", "transformer_clip"}) {
    cases[name] = TransformerCase();
  }
  for (const char* name :
       {"mlp_adamw", "no_sync", "frozen", "transformer_adamw"}) {
    cases[name].task.optimizer = AdamW();
  }
  cases["clip_2"].task.clip = {0.05, 2.0};
  cases["clip_inf"].task.clip = {0.01, std::numeric_limits<double>::infinity()};
  cases["transformer_clip"].task.clip = {0.2, 2.0};
  cases["no_sync"].task.backwards = 3;
  cases["frozen"].freeze_ends = true;
  // A product in bf16 is rounded to 8 bits, and kernels differ in the order in
  // which they sum.
  cases["bf16"].options.unit.precision = ComputeIn(at::kBFloat16);
  cases["bf16"].tolerance = 1e-2;
  cases["hybrid"].options.unit.strategy = ShardingStrategy::kHybridShard;
  cases["hybrid"].replicas = 2;
  return cases;
}

// One line of the file, such as "mlp_sgd fsdp1 2 loss 0.67 0.37".
struct Figures {
  std::string name;
  std::string implementation;
  int ranks = 0;
  std::string quantity;
  std::vector<double> values;
};

std::vector<Figures> ReadFigures() {
  std::vector<Figures> result;
  std::ifstream file("fsdp/testing/pytorch_figures.txt");
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    Figures& figures = result.emplace_back();
    words >> figures.name >> figures.implementation >> figures.ranks >>
        figures.quantity;
    for (double value; words >> value;) figures.values.push_back(value);
  }
  return result;
}

absl::StatusOr<TaskRecord> Train(const Case& c, Communicator& world) {
  std::vector<MeshDimension> dimensions = {{"shard", -1}};
  if (c.replicas > 1) {
    dimensions.insert(dimensions.begin(), {"replicate", c.replicas});
  }
  FSDP_ASSIGN_OR_RETURN(Mesh mesh, Mesh::Create(Unowned(world), dimensions));
  if (c.transformer) {
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeTransformer(), mesh, c.options));
    return RunSharded(c.task, model);
  }
  std::shared_ptr<NetImpl> net = MakeNet(7, 3);
  if (c.freeze_ends) {
    net->embed->weight.requires_grad_(false);
    net->embed->bias.requires_grad_(false);
    for (at::Tensor& p : net->blocks[1]->parameters()) p.requires_grad_(false);
  }
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, mesh, c.options));
  return RunSharded(c.task, model);
}

MATCHER_P(IsNear, relative, "") {
  const auto [actual, expected] = arg;
  return std::abs(actual - expected) <= relative * std::abs(expected);
}

class PyTorchParityTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PyTorchParityTest, LossesAndNormsAreThoseOfPyTorch) {
  const Case c = Cases()[GetParam()];
  std::map<int, TaskRecord> records;  // by number of ranks
  int compared = 0;
  for (const Figures& figures : ReadFigures()) {
    if (figures.name != GetParam()) continue;
    if (records.count(figures.ranks) == 0) {
      TaskRecord& record = records[figures.ranks];
      ASSERT_OK(
          RunAllRanks(figures.ranks, [&](Communicator& world) -> absl::Status {
            FSDP_ASSIGN_OR_RETURN(TaskRecord mine, Train(c, world));
            if (world.rank() == 0) record = std::move(mine);
            return absl::OkStatus();
          }));
    }
    const TaskRecord& record = records[figures.ranks];
    EXPECT_THAT(figures.quantity == "norm" ? record.norms : record.losses,
                ::testing::Pointwise(IsNear(c.tolerance), figures.values))
        << figures.implementation << ", " << figures.quantity << " of "
        << figures.ranks << " ranks";
    ++compared;
  }
  EXPECT_GE(compared, 2);
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, unused] : Cases()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, PyTorchParityTest, ::testing::ValuesIn(Names()),
                         [](const auto& info) { return info.param; });

TEST(PyTorchFiguresTest, EveryFigureBelongsToACase) {
  const std::map<std::string, Case> cases = Cases();
  const std::vector<Figures> all = ReadFigures();
  EXPECT_FALSE(all.empty());
  for (const Figures& figures : all) {
    EXPECT_EQ(cases.count(figures.name), 1) << figures.name;
    EXPECT_EQ(figures.values.size(), 5) << figures.name;
  }
}

}  // namespace
}  // namespace fsdp::testing
