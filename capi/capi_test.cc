// The programs in C and Fortran against plain LibTorch, and what the functions
// refuse. Ranks of the programs are processes, others threads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/files/testing/real_files.h"
#include "base/testing/compare_tensors.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "capi/libtorch_fsdp.h"
#include "checkpoint/model_files.h"
#include "comm/startup/bootstrap_socket.h"
#include "fsdp/script_module.h"

namespace fsdp {
namespace {

using ::fsdp::testing::LargestDifference;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::ReadWholeFile;
using ::fsdp::testing::RunCommand;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::torch::jit::Module;

constexpr int kRows = 4;  // of the programs' batches
constexpr int kDim = 8;
constexpr char kProgram[] = "capi/train";

// --- The script, and what LibTorch makes of it -------------------------------

void AddParameter(Module& module, const std::string& name,
                  const std::vector<int64_t>& sizes) {
  module.register_parameter(name, at::zeros(sizes).set_requires_grad(true),
                            false);
}

Module MakeNet() {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  const auto make = [&](const std::string& type) {
    Module module(c10::QualifiedName("__torch__." + type), unit);
    module.register_attribute("training", c10::BoolType::get(), true);
    return module;
  };
  Module block = make("Block");
  AddParameter(block, "weight", {kDim, kDim});
  AddParameter(block, "bias", {kDim});
  block.define(R"(
def forward(self, x):
    return x + torch.tanh(torch.linear(x, self.weight, self.bias))
)");
  Module net = make("Net");
  AddParameter(net, "head", {1, kDim});
  net.register_module("block", block);
  net.define(R"(
def forward(self, x, y):
    z = torch.linear(self.block.forward(x), self.head) - y
    return (z * z).mean()
)");
  const c10::NoGradGuard no_grad;
  int index = 0;
  for (at::Tensor parameter : net.parameters()) {
    const at::Tensor ramp = at::arange(parameter.numel()) * 0.7 + ++index;
    parameter.copy_((ramp.sin() * 0.3).view(parameter.sizes()));
  }
  return net;
}

// The part of rank `rank` of the batch of a step, as the programs make it.
std::vector<c10::IValue> Batch(int step, int rank) {
  at::Tensor x = at::empty({kRows, kDim});
  at::Tensor y = at::empty({kRows, 1});
  for (int i = 0; i < kRows * kDim; ++i) {
    const int number = (7 * i + 5 * step + 3 * rank) % 9 - 4;
    x.data_ptr<float>()[i] = static_cast<float>(number) / 8;
  }
  for (int i = 0; i < kRows; ++i) {
    const int number = (i + step + rank) % 5 - 2;
    y.data_ptr<float>()[i] = static_cast<float>(number) / 4;
  }
  return {x, y};
}

// Trains on the batches of both ranks. Returns the losses.
std::vector<double> TrainPlain(Module& net, int steps) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& p : net.parameters()) parameters.push_back(p);
  torch::optim::AdamW optimizer(
      parameters,
      torch::optim::AdamWOptions(0.01).eps(1e-6).weight_decay(0.01));
  std::vector<double> losses;
  for (int step = 1; step <= steps; ++step) {
    const at::Tensor loss = (net.forward(Batch(step, 0)).toTensor() +
                             net.forward(Batch(step, 1)).toTensor()) /
                            2;
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(parameters, 1.0);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// --- Files and processes -----------------------------------------------------

std::string PathOf(const std::string& name) {
  return absl::StrCat(::testing::TempDir(), name);
}

std::string NetFile() {
  std::string path = PathOf("net.pt");
  MakeNet().save(path);
  return path;
}

// Returns a port of the loopback interface that nobody uses.
int FreePort() { return comm::Listen("127.0.0.1", 0).value().port; }

std::string Arguments(const std::string& net, const std::string& run,
                      const std::string& exported, int steps) {
  return absl::StrCat(net, " ", PathOf(run), " ", PathOf(exported), " ", steps);
}

// Runs two ranks of a program, each with its own arguments. They get their
// numbers as further arguments, as under MPI, or by torchrun's variables.
std::array<ProgramOutcome, 2> RunRanks(
    const std::string& program, const std::array<std::string, 2>& arguments,
    bool by_environment = false) {
  const int port = FreePort();
  std::array<ProgramOutcome, 2> outcomes;
  const auto run = [&](int rank) {
    const std::string command = absl::StrCat(program, " ", arguments[rank]);
    outcomes[rank] = RunCommand(
        by_environment
            ? absl::StrCat("OMP_NUM_THREADS=1 RANK=", rank,
                           " WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=",
                           port, " ", command)
            : absl::StrCat("OMP_NUM_THREADS=1 ", command, " ", rank,
                           " 2 127.0.0.1:", port));
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  return outcomes;
}

// Trains by a program, which has to succeed. Returns rank 0's lines of steps.
std::vector<std::string> Train(const std::string& program,
                               const std::string& arguments,
                               bool by_environment = false) {
  const auto outcomes =
      RunRanks(program, {arguments, arguments}, by_environment);
  for (const ProgramOutcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, 0) << outcome.output;
  }
  EXPECT_THAT(outcomes[1].output, Not(HasSubstr("step ")));
  return absl::StrSplit(outcomes[0].output, '\n', [](absl::string_view line) {
    return absl::StartsWith(line, "step ");
  });
}

// --- The programs ------------------------------------------------------------

TEST(CApiTest, TrainsAsPlainLibTorch) {
  const std::vector<std::string> lines =
      Train(kProgram, Arguments(NetFile(), "plain_run", "plain_model", 6));
  Module plain = MakeNet();
  const std::vector<double> losses = TrainPlain(plain, 6);
  ASSERT_THAT(lines, SizeIs(6));
  for (int i = 0; i < 6; ++i) {
    int step = 0;
    double loss = 0;
    ASSERT_EQ(sscanf(lines[i].c_str(), "step %d loss %lf", &step, &loss), 2);
    EXPECT_EQ(step, i + 1);
    EXPECT_NEAR(loss, losses[i], 1e-5) << lines[i];
  }

  const auto exported = std::make_shared<ScriptModuleImpl>(MakeNet());
  ASSERT_OK(checkpoint::LoadModel(PathOf("plain_model"), *exported));
  for (const auto& expected : plain.named_parameters()) {
    EXPECT_LT(
        LargestDifference(exported->named_parameters()[expected.name].detach(),
                          expected.value.detach()),
        1e-5)
        << expected.name;
  }
}

TEST(CApiTest, ResumesToTheSameBits) {
  const std::string net = NetFile();
  const std::vector<std::string> unbroken =
      Train(kProgram, Arguments(net, "unbroken", "unbroken_model", 6));
  std::vector<std::string> broken =
      Train(kProgram, Arguments(net, "broken", "half", 3));
  const std::vector<std::string> rest =
      Train(kProgram, Arguments(net, "broken", "broken_model", 6),
            /*by_environment=*/true);
  ASSERT_THAT(rest, SizeIs(3));
  broken.insert(broken.end(), rest.begin(), rest.end());
  EXPECT_EQ(broken, unbroken);
  EXPECT_EQ(ReadWholeFile(PathOf("broken_model/model.safetensors")),
            ReadWholeFile(PathOf("unbroken_model/model.safetensors")));
}

TEST(CApiTest, FortranGetsWhatCGets) {
  if (RunCommand("gfortran --version").code != 0) {
    GTEST_SKIP() << "not checked: there is no gfortran";
  }
  if (RunCommand("grep -qE '__(asan|tsan)_init' capi/libtorch_fsdp_c.so")
          .code == 0) {
    GTEST_SKIP() << "not checked: gfortran does not link sanitizers";
  }
  const std::string folder = RunCommand("pwd").output;
  const std::string here = folder.substr(0, folder.find('\n'));
  const std::string program = PathOf("train_fortran");
  const ProgramOutcome built = RunCommand(
      absl::StrCat("gfortran -J ", ::testing::TempDir(), " -o ", program,
                   " capi/train.f90 -Lcapi -l:libtorch_fsdp_c.so -Wl,-rpath,",
                   here, "/capi -Wl,--allow-shlib-undefined"));
  ASSERT_EQ(built.code, 0) << built.output;

  const std::string net = NetFile();
  EXPECT_EQ(Train(program, Arguments(net, "fortran", "fortran_model", 4)),
            Train(kProgram, Arguments(net, "c", "c_model", 4)));
  EXPECT_EQ(ReadWholeFile(PathOf("fortran_model/model.safetensors")),
            ReadWholeFile(PathOf("c_model/model.safetensors")));
}

TEST(CApiTest, OneRankOfAProgramRefusesSoAllDo) {
  const auto outcomes = RunRanks(
      kProgram, {Arguments(NetFile(), "refused", "refused_model", 1),
                 Arguments("missing.pt", "refused", "refused_model", 1)});
  for (const ProgramOutcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, FSDP_NOT_FOUND);
    EXPECT_THAT(outcome.output, HasSubstr("NOT_FOUND: rank 1: missing.pt"));
  }
}

// --- Single functions --------------------------------------------------------

// Expects that `call` has returned `code`, with `text` in the text.
void ExpectError(int call, int code, const std::string& text) {
  EXPECT_EQ(call, code) << text;
  EXPECT_THAT(fsdp_last_error(), HasSubstr(text));
}

TEST(CApiTest, NullHandlesAreRefused) {
  EXPECT_STREQ(fsdp_version(), FSDP_VERSION);
  const int code = FSDP_INVALID_ARGUMENT;
  int rank = 0;
  ExpectError(fsdp_ranks_rank(nullptr, &rank), code, "fsdp_ranks_rank: a poi");
  ExpectError(fsdp_model_step(nullptr), code, "fsdp_model_step: a pointer is");
  ExpectError(fsdp_model_load(nullptr, "a", nullptr, nullptr), code, "is null");
  ExpectError(fsdp_ranks_connect(0, 1, nullptr, 1, nullptr), code, "is null");
  EXPECT_EQ(fsdp_ranks_destroy(nullptr), FSDP_OK);
  EXPECT_EQ(fsdp_model_destroy(nullptr), FSDP_OK);
  // Each thread has its own text.
  std::thread([] { EXPECT_STREQ(fsdp_last_error(), ""); }).join();
}

TEST(CApiTest, PlacesThatCannotBeAreRefused) {
  const int code = FSDP_INVALID_ARGUMENT;
  fsdp_ranks* ranks = nullptr;
  ExpectError(fsdp_ranks_connect(2, 2, "a:1", 1, &ranks), code, "rank 2 of 2");
  ExpectError(fsdp_ranks_connect(0, 2, nullptr, 1, &ranks), code, "an address");
  for (const char* address : {"node1", ":29500", "node1:", "node1:65536",
                              "::1:80", "[node1:80", ""}) {
    ExpectError(fsdp_ranks_connect(0, 2, address, 1, &ranks), code,
                "expected host:port");
  }
  ExpectError(fsdp_ranks_connect(0, 1, nullptr, 0, &ranks), code, "timeout");
  EXPECT_EQ(ranks, nullptr);
}

// The only rank of a job.
class OneRankTest : public ::testing::Test {
 protected:
  OneRankTest() {
    EXPECT_EQ(fsdp_ranks_connect(0, 1, nullptr, 60, &ranks_), FSDP_OK)
        << fsdp_last_error();
  }
  ~OneRankTest() override {
    EXPECT_EQ(fsdp_model_destroy(model_), FSDP_OK);
    EXPECT_EQ(fsdp_ranks_destroy(ranks_), FSDP_OK);
  }

  void Load() {
    ASSERT_EQ(fsdp_model_load(ranks_, NetFile().c_str(), nullptr, &model_),
              FSDP_OK)
        << fsdp_last_error();
  }
  // Passes the batch of step 1 and rank 0, described otherwise.
  int Forward(int32_t dtype = FSDP_FLOAT32, int32_t ndim = 2) {
    const std::vector<c10::IValue> batch = Batch(1, 0);
    const int64_t x_sizes[] = {kRows, kDim}, y_sizes[] = {kRows, 1};
    const fsdp_tensor inputs[] = {
        {batch[0].toTensor().const_data_ptr(), dtype, ndim, x_sizes},
        {batch[1].toTensor().const_data_ptr(), FSDP_FLOAT32, 2, y_sizes}};
    return fsdp_model_forward(model_, inputs, 2);
  }

  fsdp_ranks* ranks_ = nullptr;
  fsdp_model* model_ = nullptr;
};

TEST_F(OneRankTest, FilesAndOptionsThatCannotBeAreRefused) {
  const auto load = [&](const std::string& path,
                        const fsdp_model_options* options) {
    return fsdp_model_load(ranks_, path.c_str(), options, &model_);
  };
  ExpectError(load("missing.pt", nullptr), FSDP_NOT_FOUND, "missing.pt");
  const std::string text = PathOf("text.pt");
  std::ofstream(text) << "not a script";
  ExpectError(load(text, nullptr), FSDP_INVALID_ARGUMENT, "text.pt");
  const fsdp_model_options later = {7, FSDP_AS_STORED, nullptr};
  // Before a script is read, which may take long.
  ExpectError(load("missing.pt", &later), FSDP_INVALID_ARGUMENT,
              "version is 7");
  const fsdp_model_options dtype = {FSDP_MODEL_OPTIONS_VERSION, 99, nullptr};
  ExpectError(load("missing.pt", &dtype), FSDP_INVALID_ARGUMENT, "dtype 99");
  const fsdp_model_options typed = {FSDP_MODEL_OPTIONS_VERSION, FSDP_AS_STORED,
                                    " Block, Blok"};
  ExpectError(load(NetFile(), &typed), FSDP_INVALID_ARGUMENT,
              "names \"Blok\": the script has Block, ");
  EXPECT_EQ(model_, nullptr);
}

TEST_F(OneRankTest, TypesOfUnitsMayStandApart) {
  const fsdp_model_options typed = {FSDP_MODEL_OPTIONS_VERSION, FSDP_AS_STORED,
                                    " Block ,"};
  EXPECT_EQ(fsdp_model_load(ranks_, NetFile().c_str(), &typed, &model_),
            FSDP_OK)
      << fsdp_last_error();
}

TEST_F(OneRankTest, CallsOutOfOrderAreRefused) {
  Load();
  const int code = FSDP_FAILED_PRECONDITION;
  double loss = 0;
  ExpectError(fsdp_model_loss(model_, &loss), code, "no output");
  ExpectError(fsdp_model_backward(model_), code, "no output");
  ExpectError(fsdp_model_step(model_), code, "no optimizer");
  ExpectError(fsdp_model_set_learning_rate(model_, 1), code, "no optimizer");
  ASSERT_EQ(Forward(), FSDP_OK) << fsdp_last_error();
  ASSERT_EQ(fsdp_model_backward(model_), FSDP_OK) << fsdp_last_error();
  EXPECT_EQ(fsdp_model_backward(model_), FSDP_INVALID_ARGUMENT);
  ExpectError(fsdp_model_save(model_, PathOf("before").c_str(), -1),
              FSDP_INVALID_ARGUMENT, "step -1");
  ASSERT_EQ(fsdp_model_export(model_, PathOf("once").c_str()), FSDP_OK)
      << fsdp_last_error();
  ExpectError(fsdp_model_export(model_, PathOf("once").c_str()),
              FSDP_ALREADY_EXISTS, "once");
}

TEST_F(OneRankTest, OutputsAreCopied) {
  Load();
  ASSERT_EQ(fsdp_model_set_training(model_, 0), FSDP_OK);
  ASSERT_EQ(Forward(), FSDP_OK) << fsdp_last_error();
  int32_t dtype = 0, ndim = -1;
  int64_t sizes[FSDP_MAX_DIMS];
  ASSERT_EQ(fsdp_model_output_shape(model_, &dtype, &ndim, sizes), FSDP_OK);
  EXPECT_EQ(dtype, FSDP_FLOAT32);
  EXPECT_EQ(ndim, 0);
  float output = 0;
  double loss = 0;
  ExpectError(fsdp_model_output(model_, 8, &output), FSDP_INVALID_ARGUMENT,
              "the output has 4");
  ASSERT_EQ(fsdp_model_output(model_, 4, &output), FSDP_OK);
  ASSERT_EQ(fsdp_model_loss(model_, &loss), FSDP_OK);
  EXPECT_EQ(output, loss);
  EXPECT_NEAR(loss, MakeNet().forward(Batch(1, 0)).toTensor().item<double>(),
              1e-5);
  // An evaluation keeps nothing for backward.
  EXPECT_EQ(fsdp_model_backward(model_), FSDP_INVALID_ARGUMENT);
}

TEST_F(OneRankTest, RatesAreThoseThatAreSet) {
  Load();
  const int code = FSDP_INVALID_ARGUMENT;
  EXPECT_EQ(fsdp_model_use_adamw(model_, -1, 0.9, 0.999, 1e-8, 0), code);
  ASSERT_EQ(fsdp_model_use_adamw(model_, 1, 0.9, 0.999, 1e-8, 0), FSDP_OK);
  ExpectError(fsdp_model_set_learning_rate(model_, -1), code, "rate is -1");
  ExpectError(fsdp_model_set_learning_rate(model_, HUGE_VAL), code, "is inf");
  ASSERT_EQ(fsdp_model_set_learning_rate(model_, 0), FSDP_OK);
  double before = 0, after = 0, norm = 0;
  ASSERT_EQ(Forward(), FSDP_OK);
  ASSERT_EQ(fsdp_model_loss(model_, &before), FSDP_OK);
  ASSERT_EQ(fsdp_model_backward(model_), FSDP_OK);
  EXPECT_EQ(fsdp_model_clip_grad_norm(model_, 0, &norm), code);
  ASSERT_EQ(fsdp_model_clip_grad_norm(model_, 1e9, &norm), FSDP_OK);
  EXPECT_GT(norm, 0);
  ASSERT_EQ(fsdp_model_step(model_), FSDP_OK) << fsdp_last_error();
  ASSERT_EQ(Forward(), FSDP_OK);
  ASSERT_EQ(fsdp_model_loss(model_, &after), FSDP_OK);
  EXPECT_EQ(before, after);
}

TEST_F(OneRankTest, InputsThatCannotBeAreRefusedAndThoseThatDoNotFitFail) {
  Load();
  const int code = FSDP_INVALID_ARGUMENT;
  ExpectError(Forward(99), code, "input 0: dtype 99");
  ExpectError(Forward(FSDP_FLOAT32, 9), code, "input 0: ndim is 9");
  const fsdp_tensor nothing = {nullptr, FSDP_FLOAT32, 0, nullptr};
  ExpectError(fsdp_model_forward(model_, &nothing, 1), code, "is null");
  ExpectError(fsdp_model_forward(model_, &nothing, -1), code, "num_inputs");
  ASSERT_EQ(Forward(), FSDP_OK) << fsdp_last_error();
  // The script refuses these itself.
  EXPECT_NE(Forward(FSDP_FLOAT32, 1), FSDP_OK);
  EXPECT_THAT(fsdp_last_error(), HasSubstr("forward"));
}

TEST(CApiTest, RanksThatAllRefuseMayGoOn) {
  const std::string net = NetFile();
  const std::string address = absl::StrCat("127.0.0.1:", FreePort());
  const auto run = [&](int rank) {
    fsdp_ranks* ranks = nullptr;
    ASSERT_EQ(fsdp_ranks_connect(rank, 2, address.c_str(), 60, &ranks), FSDP_OK)
        << fsdp_last_error();
    int size = 0;
    EXPECT_EQ(fsdp_ranks_size(ranks, &size), FSDP_OK);
    EXPECT_EQ(size, 2);
    EXPECT_EQ(fsdp_ranks_barrier(ranks), FSDP_OK);
    double mean = 0;
    EXPECT_EQ(fsdp_ranks_mean(ranks, rank, &mean), FSDP_OK);
    EXPECT_EQ(mean, 0.5);

    fsdp_model* model = nullptr;
    const fsdp_model_options options = {rank == 1 ? 2 : 1, FSDP_BFLOAT16,
                                        "Block"};
    ExpectError(fsdp_model_load(ranks, net.c_str(), &options, &model),
                FSDP_INVALID_ARGUMENT, "rank 1: fsdp_model_options::version");
    EXPECT_EQ(fsdp_model_load(ranks, net.c_str(), nullptr, &model), FSDP_OK)
        << fsdp_last_error();
    EXPECT_EQ(fsdp_model_destroy(model), FSDP_OK);
    EXPECT_EQ(fsdp_ranks_destroy(ranks), FSDP_OK);
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

}  // namespace
}  // namespace fsdp
