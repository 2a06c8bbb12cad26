#include "examples/gpt/flags.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/command_line.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "examples/gpt/default_text.h"

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

using ::fsdp::ResolvePath;

absl::Status Invalid(absl::string_view flag, absl::string_view value,
                     absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", value, ": ", why));
}

absl::Status CheckRange(absl::string_view flag, int64_t value, int64_t least) {
  constexpr int64_t kMost = 1 << 20;  // more than any machine can train
  if (value >= least && value <= kMost) return absl::OkStatus();
  return Invalid(flag, absl::StrCat(value),
                 absl::StrCat("expected ", least, " to ", kMost));
}

template <typename T>
absl::StatusOr<T> Choose(absl::string_view flag, const std::string& value,
                         const std::map<std::string, T>& choices) {
  const auto found = choices.find(value);
  if (found != choices.end()) return found->second;
  return Invalid(
      flag, value,
      absl::StrCat("expected one of ",
                   absl::StrJoin(choices, ", ",
                                 [](std::string* out, const auto& choice) {
                                   out->append(choice.first);
                                 })));
}

absl::Status Check(const Flags& flags) {
  const std::vector<std::pair<absl::string_view, int64_t>> positive = {
      {"steps", flags.steps},       {"batch", flags.batch},
      {"seq", flags.model.seq},     {"layers", flags.model.layers},
      {"width", flags.model.width}, {"ranks", flags.ranks}};
  for (const auto& [flag, value] : positive) {
    FSDP_RETURN_IF_ERROR(CheckRange(flag, value, 1));
  }
  FSDP_RETURN_IF_ERROR(CheckRange("save_every", flags.save_every, 0));
  if (flags.model.width % kHeadWidth != 0) {
    return Invalid("width", absl::StrCat(flags.model.width),
                   absl::StrCat("expected a multiple of ", kHeadWidth));
  }
  if (!(flags.lr > 0 && flags.lr <= 1)) {
    return Invalid("lr", absl::StrCat(flags.lr),
                   "expected more than 0, up to 1");
  }
  if (flags.save.empty() && (flags.resume || flags.save_every > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.resume ? "--resume" : "--save_every",
                     " without --save, which names the folder of checkpoints"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Flags> ReadFlags(int argc, char** argv) {
  const std::vector<char*> rest = fsdp::ParseCommandLine(
      argc, argv,
      "Trains a byte-level GPT with Fully Sharded Data Parallel.\n\n"
      "  bazel run //examples/gpt:train -- --data=my_text.txt --ranks=4",
      "examples/gpt/flags.cc");
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("what is ", rest[1], "? Flags begin with --"));
  }
  Flags flags;
  flags.steps = absl::GetFlag(FLAGS_steps);
  flags.batch = absl::GetFlag(FLAGS_batch);
  flags.model = {absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_width),
                 absl::GetFlag(FLAGS_seq)};
  flags.lr = absl::GetFlag(FLAGS_lr);
  FSDP_ASSIGN_OR_RETURN(
      flags.bf16, Choose<bool>("precision", absl::GetFlag(FLAGS_precision),
                               {{"fp32", false}, {"bf16", true}}));
  FSDP_ASSIGN_OR_RETURN(
      flags.offload, Choose<fsdp::Tier>("offload", absl::GetFlag(FLAGS_offload),
                                        {{"none", fsdp::Tier::kDevice},
                                         {"cpu", fsdp::Tier::kCpu},
                                         {"ssd", fsdp::Tier::kSsd}}));
  FSDP_ASSIGN_OR_RETURN(flags.device,
                        Choose<torch::DeviceType>(
                            "device", absl::GetFlag(FLAGS_device),
                            {{"cpu", torch::kCPU}, {"cuda", torch::kCUDA}}));
  flags.ranks = absl::GetFlag(FLAGS_ranks);
  flags.save = ResolvePath(absl::GetFlag(FLAGS_save));
  flags.save_every = absl::GetFlag(FLAGS_save_every);
  flags.resume = absl::GetFlag(FLAGS_resume);
  flags.export_folder = ResolvePath(absl::GetFlag(FLAGS_export));
  FSDP_RETURN_IF_ERROR(Check(flags));
  flags.data = ResolvePath(absl::GetFlag(FLAGS_data));
  if (flags.data.empty()) {
    FSDP_ASSIGN_OR_RETURN(flags.data, DefaultText(argv[0]));
  }
  return flags;
}

}  // namespace gpt
