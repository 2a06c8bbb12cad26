// Trains a byte-level GPT, sharded over the processes of this host or of many.
//   bazel run //examples/gpt:train -- --help
//   bazel run --config=cuda //examples/gpt:train_cuda -- --device=cuda
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/command_line.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/gpt/data.h"
#include "examples/gpt/model.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"
#ifdef WITH_CUDA
#include "comm/nccl/nccl_communicator.h"
#endif

namespace gpt {
namespace {

// The command line says these.
struct Flags {
  std::string data;  // a file or a folder
  int64_t steps = 900;
  int64_t batch = 4;  // rows per rank and step
  GptConfig model;
  double lr = 3e-4;
  bool bf16 = false;
  fsdp::Tier offload = fsdp::Tier::kDevice;
  torch::DeviceType device = torch::kCPU;
  int ranks = 2;
  std::string save;        // a folder of checkpoints; empty: none
  int64_t save_every = 0;  // steps; 0: only at the end
  bool resume = false;
  std::string export_folder;  // a new folder; empty: none
};

}  // namespace
}  // namespace gpt

ABSL_FLAG(std::string, data, "",
          "A text file, or a folder of them. Default: LibTorch's C++ headers.");
ABSL_FLAG(int64_t, steps, gpt::Flags().steps, "Training steps.");
ABSL_FLAG(int64_t, batch, gpt::Flags().batch, "Rows per rank and step.");
ABSL_FLAG(int64_t, seq, gpt::GptConfig().seq, "Bytes per row.");
ABSL_FLAG(int64_t, layers, gpt::GptConfig().layers, "Transformer blocks.");
ABSL_FLAG(int64_t, width, gpt::GptConfig().width,
          "Width of the model, a multiple of 64, the width of a head.");
ABSL_FLAG(double, lr, gpt::Flags().lr,
          "Learning rate of AdamW behind a warm-up; half a cosine follows.");
ABSL_FLAG(std::string, precision, "fp32",
          "fp32, or bf16: gather and compute in bf16, reduce and keep "
          "parameters and optimizer state in fp32.");
ABSL_FLAG(std::string, offload, "none",
          "Where parameters, gradients and optimizer state rest while nothing "
          "computes with them: none, cpu (host memory) or ssd (files in "
          "$TMPDIR that vanish with the run).");
ABSL_FLAG(std::string, device, "cpu",
          "cpu, or cuda, which takes //examples/gpt:train_cuda.");
ABSL_FLAG(int, ranks, gpt::Flags().ranks,
          "Processes to start on this host. Under torchrun, Slurm and mpirun "
          "these decide instead.");
ABSL_FLAG(std::string, save, "",
          "Keep checkpoints in this folder: of the last step, and of the one "
          "after which SIGTERM or SIGINT stops the run.");
ABSL_FLAG(int64_t, save_every, gpt::Flags().save_every,
          "With --save: also after each so many steps.");
ABSL_FLAG(bool, resume, gpt::Flags().resume,
          "With --save: go on from the newest checkpoint, or begin where there "
          "is none.");
ABSL_FLAG(std::string, export, "",
          "Write the trained model to this new folder, as safetensors.");

namespace gpt {
namespace {

using ::fsdp::ReadFlag;
using ::fsdp::ResolvePath;
using ::fsdp::checkpoint::Checkpointer;
using ::fsdp::comm::Communicator;

using Model = fsdp::FullyShardedDataParallel<GptImpl>;

constexpr double kMaxGradNorm = 1;
constexpr int64_t kLinesPerRun = 50;
constexpr int64_t kPromptBytes = 64;
constexpr int64_t kSampleBytes = 300;
constexpr double kTemperature = 0.8;

constexpr int64_t kMost = 1 << 20;  // more than any machine can train

// InvalidArgument names the flag that has an impossible value.
absl::StatusOr<Flags> ReadFlags(int argc, char** argv) {
  FSDP_RETURN_IF_ERROR(fsdp::ParseFlags(
      argc, argv,
      "Trains a byte-level GPT with Fully Sharded Data Parallel.\n\n"
      "  bazel run //examples/gpt:train -- --data=my_text.txt --ranks=4",
      "examples/gpt/train.cc"));
  Flags flags;
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_steps, 1, kMost, flags.steps));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_batch, 1, kMost, flags.batch));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_seq, 1, kMost, flags.model.seq));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_layers, 1, kMost, flags.model.layers));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_width, 1, kMost, flags.model.width));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_ranks, 1, 1024, flags.ranks));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_save_every, 0, kMost, flags.save_every));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_precision, {{"fp32", false}, {"bf16", true}}, flags.bf16));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_offload,
                                {{"none", fsdp::Tier::kDevice},
                                 {"cpu", fsdp::Tier::kCpu},
                                 {"ssd", fsdp::Tier::kSsd}},
                                flags.offload));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_device,
                                {{"cpu", torch::kCPU}, {"cuda", torch::kCUDA}},
                                flags.device));
  flags.lr = absl::GetFlag(FLAGS_lr);
  flags.save = ResolvePath(absl::GetFlag(FLAGS_save));
  flags.resume = absl::GetFlag(FLAGS_resume);
  flags.export_folder = ResolvePath(absl::GetFlag(FLAGS_export));
  if (flags.model.width % kHeadWidth != 0) {
    return fsdp::InvalidFlag(
        FLAGS_width, flags.model.width,
        absl::StrCat("expected a multiple of ", kHeadWidth));
  }
  if (!(flags.lr > 0 && flags.lr <= 1)) {
    return fsdp::InvalidFlag(FLAGS_lr, flags.lr,
                             "expected more than 0, up to 1");
  }
  if (flags.save.empty() && (flags.resume || flags.save_every > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.resume ? "--resume" : "--save_every",
                     " without --save, which names the folder of checkpoints"));
  }
  if (!flags.save.empty() && flags.save == flags.export_folder) {
    return fsdp::InvalidFlag(FLAGS_export, flags.export_folder,
                             "it is the folder of --save");
  }
  flags.data = ResolvePath(absl::GetFlag(FLAGS_data));
  if (flags.data.empty()) {
    FSDP_ASSIGN_OR_RETURN(flags.data, DefaultText(argv[0]));
  }
  return flags;
}

// Refuses before the training what could not be written after it.
absl::Status CheckOutputs(const Flags& flags) {
  if (!flags.export_folder.empty()) {
    FSDP_RETURN_IF_ERROR(fsdp::Annotate(
        fsdp::checkpoint::CheckCanExport(flags.export_folder), "--export"));
  }
  if (flags.save.empty() || flags.resume) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const auto newest,
                        fsdp::checkpoint::NewestStep(flags.save));
  if (!newest.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("--save=", flags.save,
                   " has checkpoints: go on from them by --resume, or name "
                   "another folder"));
}

absl::StatusOr<Model> MakeModel(const Flags& flags, torch::Device device,
                                const std::shared_ptr<Communicator>& ranks) {
  torch::manual_seed(0);
  Gpt net(nullptr);
  {
    const fsdp::DeferredInit deferred;  // no rank ever has all of it
    net = Gpt(flags.model);
    net->to(device);
  }
  fsdp::Options options;
  options.wrap_policy = fsdp::WrapModules<BlockImpl>();
  if (flags.bf16) {
    options.unit.precision = fsdp::ComputeIn(torch::kBFloat16);
    options.unit.precision.output_dtype = torch::kFloat;  // for the loss
  }
  options.offload.parameters = flags.offload;
  options.offload.gradients = flags.offload;
  options.offload.optimizer = flags.offload;
  if (flags.offload == fsdp::Tier::kSsd) {
    std::error_code error;
    const auto path = std::filesystem::temp_directory_path(error);
    options.offload.directory = error ? "/tmp" : path.string();
  }
  return fsdp::FullyShard(net, ranks, options);
}

// Returns what the model writes behind a piece of the text. All ranks call it
// and get the same.
std::string Sample(Model& model, const torch::Tensor& text, int64_t seq,
                   torch::Device device) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/0);
  const int64_t middle = text.numel() / 2;
  torch::Tensor bytes =
      text.slice(/*dim=*/0, middle, middle + kPromptBytes).to(torch::kLong);
  const int64_t prompt = bytes.numel();
  for (int64_t i = 0; i < kSampleBytes; ++i) {
    const torch::Tensor last =
        bytes.slice(0, std::max<int64_t>(0, bytes.numel() - seq));
    const torch::Tensor logits =
        model->forward(last.unsqueeze(0).to(device)).select(1, -1).cpu();
    const torch::Tensor next =
        torch::multinomial(torch::softmax(logits / kTemperature, -1),
                           /*num_samples=*/1, /*replacement=*/true, generator);
    bytes = torch::cat({bytes, next.view({1})});
  }
  std::string printed;
  for (int64_t i = 0; i < bytes.numel(); ++i) {
    if (i == prompt) printed += "\n--- as the model goes on ---\n";
    const auto byte = static_cast<unsigned char>(bytes[i].item<int64_t>());
    const bool is_shown = absl::ascii_isprint(byte) || byte == '\n';
    printed += is_shown ? static_cast<char>(byte) : '?';
  }
  return printed;
}

// Trains as one of the ranks.
absl::Status Train(const Flags& flags, torch::Device device,
                   const std::shared_ptr<Communicator>& ranks) {
  const c10::DeviceGuard guard_of_device(device);
  const bool is_first = ranks->rank() == 0;
  absl::Status ready = is_first ? CheckOutputs(flags) : absl::OkStatus();
  const auto text = ReadText(flags.data, flags.model.seq);
  ready.Update(text.status());
  // All ranks end with the same error if one of them cannot begin.
  FSDP_RETURN_IF_ERROR(fsdp::comm::Agree(
      *ranks, ready, "preparing", absl::Now() + ranks->default_timeout()));

  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(flags, device, ranks));
  fsdp::FusedAdamW optimizer(model->Parameters(),
                             torch::optim::AdamWOptions(flags.lr));
  fsdp::WarmUpCosine rates(optimizer, {flags.steps / 20, flags.steps});

  fsdp::checkpoint::TrainingRun run;
  run.model = model.get();
  run.optimizer = &optimizer;
  run.schedulers = {&rates};
  std::unique_ptr<Checkpointer> checkpoints;
  int64_t done = 0;
  if (!flags.save.empty()) {
    FSDP_ASSIGN_OR_RETURN(checkpoints, Checkpointer::Open(flags.save, ranks));
    if (flags.resume) {
      FSDP_ASSIGN_OR_RETURN(const auto newest, checkpoints->LoadLatest(run));
      done = newest.value_or(0);
    }
  }
  // These flags decide which rows a step trains on.
  const auto other_than_saved = fsdp::checkpoint::NoteFlags(
      {{"--batch", absl::StrCat(flags.batch)},
       {"--data", flags.data},
       {"--ranks", absl::StrCat(ranks->world_size())},
       {"--seq", absl::StrCat(flags.model.seq)},
       {"--steps", absl::StrCat(flags.steps)}},
      done, flags.steps, &run);
  if (is_first) {
    std::cout << absl::StrFormat("%s, %.1f MB of text\n", ranks->ToString(),
                                 text->numel() / 1e6);
    if (done > 0) std::cout << "goes on after step " << done << "\n";
    for (const std::string& line : other_than_saved) std::cout << line << "\n";
    std::cout << std::flush;
  }

  fsdp::checkpoint::RunGuardOptions guarded;
  guarded.save_every = flags.save_every;
  fsdp::checkpoint::RunGuard guard(ranks, checkpoints.get(), &run, guarded);
  const Share share{ranks->rank(), ranks->world_size(), flags.batch,
                    flags.model.seq};
  const int64_t steps_per_line =
      std::max<int64_t>(1, flags.steps / kLinesPerRun);
  int64_t shown = done;  // the step of the last line, and when it was
  absl::Time shown_at = absl::Now();
  for (int64_t step = done + 1; step <= flags.steps; ++step) {
    const Batch batch = BatchOf(*text, step, share);
    const torch::Tensor loss = NextByteLoss(
        model->forward(batch.inputs.to(device)), batch.targets.to(device));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    FSDP_ASSIGN_OR_RETURN(const torch::Tensor norm,
                          model->ClipGradNorm(kMaxGradNorm));
    FSDP_ASSIGN_OR_RETURN(
        const bool is_finite,
        guard.MayStep(step, loss.item<double>(), norm.item<double>()));
    if (is_finite) {
      optimizer.step();
      rates.step();
    }
    optimizer.zero_grad();
    if (step % steps_per_line == 0 || step == flags.steps) {
      const absl::Time now = absl::Now();
      const int64_t tokens =
          (step - shown) * share.ranks * share.rows * share.seq;
      if (is_first) {
        std::cout << absl::StrFormat("step %d/%d  loss %.4f  %.0f tokens/s",
                                     step, flags.steps, guard.mean_loss(),
                                     static_cast<double>(tokens) /
                                         absl::ToDoubleSeconds(now - shown_at))
                  << std::endl;
      }
      shown = step;
      shown_at = now;
    }
    // Saves when a save is due, and ends a run that a signal has told to stop.
    FSDP_RETURN_IF_ERROR(guard.EndStep(step, /*is_last=*/step == flags.steps));
  }
  if (!flags.export_folder.empty()) {
    FSDP_RETURN_IF_ERROR(
        fsdp::checkpoint::ExportModel(flags.export_folder, *model));
  }
  const std::string sample = Sample(model, *text, flags.model.seq, device);
  if (is_first) std::cout << "--- a text ---\n" << sample << std::endl;
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const fsdp::comm::StopRequest stop;  // by signals, heeded by RunGuard
  const auto flags = ReadFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status() << std::endl;
    return fsdp::comm::kUsageErrorExitCode;
  }
  fsdp::comm::NcclOn nccl_on;
#ifdef WITH_CUDA
  nccl_on = [](c10::Device /*gpu*/) { return fsdp::comm::NcclBackend(); };
#endif
  const auto device =
      fsdp::comm::ChooseDeviceOfProcess(flags->device, flags->ranks, nccl_on);
  if (!device.ok()) {
    std::cerr << "--device: " << device.status() << std::endl;
    return fsdp::comm::kUsageErrorExitCode;
  }
  fsdp::comm::ConnectOptions connect;
  connect.device = device->connect;
  return fsdp::comm::RunRanks(
      argc, argv, flags->ranks,
      [&](const std::shared_ptr<Communicator>& ranks) {
        return Train(*flags, device->device, ranks);
      },
      connect);
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) { return gpt::Main(argc, argv); }
