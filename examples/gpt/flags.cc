#include "examples/gpt/flags.h"

#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/command_line.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "examples/gpt/data.h"

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

constexpr int64_t kMost = 1 << 20;  // more than any machine can train

// Refuses flags that go together with no model or folder.
absl::Status Check(const Flags& flags) {
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
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_steps, 1, kMost, flags.steps));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_batch, 1, kMost, flags.batch));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_seq, 1, kMost, flags.model.seq));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_layers, 1, kMost, flags.model.layers));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_width, 1, kMost, flags.model.width));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_ranks, 1, kMost, flags.ranks));
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
  FSDP_RETURN_IF_ERROR(Check(flags));
  flags.data = ResolvePath(absl::GetFlag(FLAGS_data));
  if (flags.data.empty()) {
    FSDP_ASSIGN_OR_RETURN(flags.data, DefaultText(argv[0]));
  }
  return flags;
}

}  // namespace gpt
