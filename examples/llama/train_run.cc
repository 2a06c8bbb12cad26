#include "examples/llama/train_run.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/DeviceGuard.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <ostream>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "adapters/lora.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/model/llama_config.h"
#include "fsdp/memory/resting_memory.h"
#include "ranges/tensor_range.h"

namespace llama {
namespace {

using ::fsdp::checkpoint::NoteFlags;
using ::fsdp::comm::Communicator;

constexpr char kPosition[] = "rows of the data that were trained on";

// Opens NAME.bin as a file of tokens, anything else as bytes. InvalidArgument:
// tokens are not those that `model_folder`/tokenizer.json makes; or it does not
// exist, and they are not in the model's vocabulary.
absl::StatusOr<TokenFile> OpenTokens(const std::string& path,
                                     const std::string& model_folder,
                                     const LlamaConfig& config,
                                     std::ostream* warnings) {
  const bool are_tokens = absl::EndsWith(path, ".bin");
  FSDP_ASSIGN_OR_RETURN(TokenFile tokens, are_tokens
                                              ? TokenFile::Open(path)
                                              : TokenFile::OpenBytes(path));
  const std::string tokenizer = absl::StrCat(model_folder, "/tokenizer.json");
  std::error_code ignored;
  if (std::filesystem::exists(tokenizer, ignored)) {
    FSDP_RETURN_IF_ERROR(CheckTokenizer(tokens, tokenizer));
    // A tokenizer may have tokens that the model lacks and no text needs.
    tokens.LimitVocabulary(config.vocab_size);
  } else if (tokens.description().vocab_size > config.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has tokens up to ", tokens.description().vocab_size - 1,
        ", the model's vocabulary has ", config.vocab_size,
        ": make the tokens with the model's tokenizer"));
  } else if (!are_tokens && warnings != nullptr && config.vocab_size > 256) {
    *warnings << "there is no " << tokenizer << ": takes the bytes of " << path
              << " for tokens" << std::endl;
  }
  return tokens;
}

// Refuses an --offload_dir in which no file can be made.
absl::Status CheckCanHoldFiles(const std::string& folder) {
  std::error_code ignored;
  if (folder.empty() || (std::filesystem::is_directory(folder, ignored) &&
                         access(folder.c_str(), W_OK | X_OK) == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--offload_dir=", folder,
      ": there is no such folder, or this process may not make files in it: "
      "name one on a local SSD"));
}

// Has the steps of TrainRank() as methods, in their order.
class TrainRun {
 public:
  TrainRun(const TrainFlags& flags, c10::Device device,
           std::shared_ptr<Communicator> ranks,
           const fsdp::DeviceGraphMaker& make_graph)
      : flags_(flags),
        device_(device),
        ranks_(std::move(ranks)),
        make_graph_(make_graph) {}

  absl::Status Run() {
    FSDP_RETURN_IF_ERROR(Agree(Prepare(), "preparing"));
    FSDP_RETURN_IF_ERROR(fsdp::comm::CheckSame(
        *ranks_, WhatAllHave(), "flags or files of tokens of ranks",
        absl::Now() + ranks_->default_timeout()));
    FSDP_ASSIGN_OR_RETURN(model_made_, MakeModel(config_, model_, ranks_));
    if (IsFirst() && model_made_->offload_stats().has_value()) {
      std::cout << model_made_->Describe() << std::flush;
    }
    TrainerOptions options = flags_.trainer;
    options.device = device_;
    trainer_.emplace(model_made_, &*data_, ranks_, options);
    if (flags_.capture) {
      FSDP_RETURN_IF_ERROR(
          Agree(fsdp::Annotate(trainer_->Capture(make_graph_), "--capture"),
                "capturing steps"));
    }
    FSDP_RETURN_IF_ERROR(Begin());
    FSDP_RETURN_IF_ERROR(Train());
    FSDP_RETURN_IF_ERROR(Export());
    return Agree(IsFirst() ? progress_->Finish() : absl::OkStatus(),
                 "printing");
  }

 private:
  bool IsFirst() const { return ranks_->rank() == 0; }
  bool HasAdapters() const { return model_.lora.has_value(); }
  // With --from_scratch no file has the base, so that it has to be saved, too.
  bool SavesAdapters() const { return HasAdapters() && !flags_.from_scratch; }

  absl::Status Agree(const absl::Status& mine, const std::string& what) {
    return fsdp::comm::Agree(*ranks_, mine, what,
                             absl::Now() + ranks_->default_timeout());
  }

  // --- What needs no other rank ---------------------------------------------

  absl::Status Prepare() {
    torch::manual_seed(flags_.seed);
    FSDP_ASSIGN_OR_RETURN(config_,
                          ReadConfig(flags_.model, flags_.from_scratch));
    FSDP_ASSIGN_OR_RETURN(texts_, TextsBeside(flags_.model));
    model_ = flags_.made;
    model_.compute = DtypeOf(flags_.precision, device_.type(),
                             IsFirst() ? &std::cerr : nullptr);
    model_.device = device_;
    model_.seq = flags_.seq;
    FSDP_RETURN_IF_ERROR(CheckCanHoldFiles(model_.offload.directory));
    if (model_.automatic.has_value()) {
      const int ranks = ranks_->world_size();
      model_.automatic->rows = (flags_.batch + ranks - 1) / ranks;
      // Gradients are whole until the last one of a step.
      if (flags_.trainer.no_sync) {
        model_.automatic->memory.backwards_per_step =
            static_cast<int>(flags_.trainer.micro_batches);
      }
    }
    model_.seed = flags_.seed;
    model_.loaded_later = !flags_.from_scratch;
    if (!flags_.adapter.empty()) {
      FSDP_ASSIGN_OR_RETURN(model_.lora,
                            fsdp::adapters::ReadLoraConfig(flags_.adapter));
    }
    if (flags_.capture) FSDP_RETURN_IF_ERROR(CheckCanCapture());
    FSDP_RETURN_IF_ERROR(OpenData());
    if (!IsFirst()) return absl::OkStatus();
    for (const absl::Status& is_new :
         {CheckIsNew("export", flags_.export_dir),
          CheckIsNew("save_adapter", flags_.save_adapter)}) {
      if (absl::IsAlreadyExists(is_new) && IsTrained()) continue;
      FSDP_RETURN_IF_ERROR(is_new);
    }
    if (flags_.seq > config_.max_position_embeddings) {
      std::cerr << "--seq=" << flags_.seq << " is longer than the "
                << config_.max_position_embeddings
                << " positions that config.json has "
                   "(max_position_embeddings): the model has not seen those "
                   "behind them"
                << std::endl;
    }
    return CheckCanResume();
  }

  // Refuses a model whose steps need the host.
  absl::Status CheckCanCapture() const {
    if (HasAdapters() && model_.lora->dropout > 0 &&
        (model_.recompute || model_.automatic.has_value())) {
      return absl::InvalidArgumentError(
          "--capture with --recompute or --auto and adapters with dropout, "
          "whose random numbers are drawn again by the host: take "
          "--lora_dropout=0, or leave one of them away");
    }
    if (config_.rope.scaling.has_value() &&
        config_.rope.scaling->type == RopeScaling::Type::kDynamic) {
      return absl::InvalidArgumentError(
          "--capture of a model whose rope_scaling is dynamic: the host sees "
          "in each step how long the rows are");
    }
    return absl::OkStatus();
  }

  // Refuses before the training what could not be written after it.
  static absl::Status CheckIsNew(absl::string_view flag,
                                 const std::string& path) {
    if (path.empty()) return absl::OkStatus();
    return fsdp::Annotate(fsdp::checkpoint::CheckCanExport(path),
                          absl::StrCat("--", flag));
  }

  // Returns whether only the end of the job is left, parts of which may have
  // been done.
  bool IsTrained() const {
    if (flags_.resume == Resume::kNo) return false;
    const auto newest = fsdp::checkpoint::NewestStep(flags_.save);
    return newest.ok() && newest->value_or(-1) >= flags_.steps();
  }

  absl::Status CheckCanResume() const {
    if (flags_.resume == Resume::kNo) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> newest,
                          fsdp::checkpoint::NewestStep(flags_.save));
    if (newest.has_value()) return absl::OkStatus();
    const std::string text =
        absl::StrCat("--resume: there is no checkpoint in ", flags_.save);
    if (flags_.resume == Resume::kRequired) {
      return absl::InvalidArgumentError(text);
    }
    std::cerr << text << ": begins at step 1" << std::endl;
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const RowSource>> RowsOf(
      const TokenFile& tokens, uint64_t seed, LastWindow last) const {
    return flags_.packed ? PackedRows(tokens, flags_.seq, seed)
                         : WindowRows(tokens, flags_.seq, last);
  }

  absl::Status OpenData() {
    const BatchShare share{flags_.batch, ranks_->rank(), ranks_->world_size()};
    std::ostream* const warnings =
        IsFirst() && !flags_.from_scratch ? &std::cerr : nullptr;
    FSDP_ASSIGN_OR_RETURN(
        const TokenFile tokens,
        OpenTokens(flags_.data, flags_.model, config_, warnings));
    FSDP_ASSIGN_OR_RETURN(auto rows,
                          RowsOf(tokens, flags_.seed, LastWindow::kLeftOut));
    num_rows_ = rows->num_rows();
    FSDP_ASSIGN_OR_RETURN(
        data_, TokenBatches::Create(std::move(rows), share, flags_.seed));
    if (flags_.eval_data.empty()) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(
        const TokenFile eval,
        OpenTokens(flags_.eval_data, flags_.model, config_, warnings));
    // By this seed documents are shuffled the same way in all runs.
    constexpr uint64_t kSeed = 0;
    FSDP_ASSIGN_OR_RETURN(rows, RowsOf(eval, kSeed, LastWindow::kPadded));
    eval_ = EvaluationBatches{std::move(rows), share};
    return absl::OkStatus();
  }

  // Returns what decides of steps, in lines. Paths may differ between hosts.
  std::string WhatAllHave() const {
    const TrainerOptions& trainer = flags_.trainer;
    return absl::StrCat(
        "rows ", num_rows_, "\nrows to evaluate ",
        eval_.has_value() ? eval_->source->num_rows() : 0, "\nsteps ",
        flags_.steps(), "\nwarmup ", trainer.schedule.warm_up, "\nlr ",
        trainer.learning_rate, "\nlr_floor ", trainer.schedule.floor,
        "\nweight_decay ", trainer.weight_decay, "\nclip ",
        trainer.max_grad_norm, "\nbatch ", flags_.batch, "\nmicro_batches ",
        trainer.micro_batches, "\nno_sync ", trainer.no_sync, "\nseq ",
        flags_.seq, "\nseed ", flags_.seed, "\npacked ", flags_.packed,
        "\neval_every ", flags_.eval_every, "\nsave_every ", flags_.save_every,
        "\nsave ", !flags_.save.empty(), "\nresume ",
        flags_.resume != Resume::kNo, "\nexport ", !flags_.export_dir.empty(),
        "\nsave_adapter ", !flags_.save_adapter.empty());
  }

  // --- Together -------------------------------------------------------------

  // Gives the model the values of a checkpoint, or else those of the files.
  absl::Status Begin() {
    run_.model = model_made_.get();
    run_.optimizer = &trainer_->optimizer();
    run_.schedulers = {&trainer_->scheduler()};
    FSDP_RETURN_IF_ERROR(OpenCheckpoints());
    // This comes later since it makes a file.
    absl::Status opened;
    if (IsFirst()) {
      ProgressOptions options;
      options.steps = flags_.steps();
      options.every = flags_.log_every;
      options.flops_per_token =
          FlopsPerToken(config_, flags_.seq, HasAdapters());
      options.metrics = flags_.metrics;
      options.device = device_;
      progress_.emplace(options, &std::cout);
      opened = progress_->Open();
    }
    FSDP_RETURN_IF_ERROR(Agree(opened, "opening files to write"));
    if (SavesAdapters()) {
      FSDP_RETURN_IF_ERROR(LoadBase(flags_.model, config_, *model_made_));
    }
    if (flags_.resume != Resume::kNo) {
      // As of --lr, this run's counts, not the checkpoint's.
      std::vector<double> decays;
      for (auto& group : trainer_->optimizer().param_groups()) {
        decays.push_back(DecayOf(group));
      }
      FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> step,
                            checkpoints_->LoadLatest(run_));
      for (size_t i = 0; i < decays.size(); ++i) {
        DecayOf(trainer_->optimizer().param_groups()[i]) = decays[i];
      }
      if (step.has_value()) return GoOn(*step);
    }
    NoteFlags(Noted(), 0, flags_.steps(), &run_);
    if (!flags_.from_scratch && !SavesAdapters()) {
      FSDP_RETURN_IF_ERROR(LoadBase(flags_.model, config_, *model_made_));
    }
    if (flags_.adapter.empty()) return absl::OkStatus();
    return fsdp::adapters::LoadAdapter(flags_.adapter, *model_made_,
                                       *model_.lora);
  }

  absl::Status OpenCheckpoints() {
    if (flags_.save.empty()) return absl::OkStatus();
    fsdp::checkpoint::CheckpointerOptions options;
    if (flags_.keep_last > 0) options.keep_last = flags_.keep_last;
    options.texts = texts_;
    if (SavesAdapters()) {
      fsdp::adapters::LoraConfig lora = *model_.lora;
      std::error_code ignored;
      lora.base_model = std::filesystem::absolute(flags_.model, ignored);
      options.texts["adapter_config.json"] = fsdp::adapters::ToJson(lora);
      std::set<std::string> trained;
      for (const fsdp::TensorRange& named : model_made_->Ranges()) {
        if (named.values.requires_grad()) trained.insert(named.name);
      }
      options.saves = [trained](const std::string& name) {
        return trained.count(name) > 0;
      };
    }
    FSDP_ASSIGN_OR_RETURN(checkpoints_, fsdp::checkpoint::Checkpointer::Open(
                                            flags_.save, ranks_, options));
    if (flags_.resume != Resume::kNo) return absl::OkStatus();
    const absl::StatusOr<std::vector<int64_t>> steps = checkpoints_->Steps();
    return Agree(!steps.ok() || steps->empty()
                     ? steps.status()
                     : absl::InvalidArgumentError(absl::StrCat(
                           "--save=", flags_.save,
                           " has checkpoints: go on from them by --resume, or "
                           "name a new folder")),
                 "opening the checkpoints");
  }

  absl::Status GoOn(int64_t step) {
    first_step_ = step;
    int64_t position = 0;
    const auto found = run_.entries.find(kPosition);
    if (found == run_.entries.end() ||
        !absl::SimpleAtoi(found->second, &position)) {
      return absl::InvalidArgumentError(absl::StrCat(
          flags_.save, ": step ", step, " does not say where it was in the ",
          "data: it is of another program"));
    }
    const auto odd = NoteFlags(Noted(), step, flags_.steps(), &run_);
    if (IsFirst()) progress_->GoesOn(step);
    for (size_t i = 0; IsFirst() && i < odd.size(); ++i) {
      std::cerr << odd[i] << std::endl;
    }
    return data_->Seek(position);
  }

  static double& DecayOf(torch::optim::OptimizerParamGroup& group) {
    return static_cast<torch::optim::AdamWOptions&>(group.options())
        .weight_decay();
  }

  // Returns the flags that decide which batch a step trains on, and what
  // weight decay.
  std::map<std::string, std::string> Noted() const {
    return {{"--data", flags_.data},
            {"--rows", flags_.packed ? "packed" : "stream"},
            {"--seed", absl::StrCat(flags_.seed)},
            {"--seq", absl::StrCat(flags_.seq)},
            {"--weight_decay", absl::StrCat(flags_.trainer.weight_decay)}};
  }

  absl::Status Train() {
    if (IsFirst()) {
      std::cout << "trains on " << num_rows_ << " rows of " << flags_.seq
                << " tokens, " << ranks_->world_size() << " ranks" << std::endl;
      progress_->Begin(absl::Now());
    }
    fsdp::checkpoint::RunGuardOptions options;
    options.save_every = flags_.save_every;
    options.max_skipped = flags_.skip_nonfinite;
    options.before_save = [this](int64_t /*step*/) {
      run_.entries[kPosition] = absl::StrCat(data_->position());
      return true;
    };
    fsdp::checkpoint::RunGuard guard(ranks_, checkpoints_.get(), &run_,
                                     options);
    for (int64_t step = first_step_; step < flags_.steps(); ++step) {
      FSDP_ASSIGN_OR_RETURN(const StepResult result,
                            trainer_->Step(step, &guard));
      if (IsFirst()) progress_->Step(step + 1, result, absl::Now());
      const bool is_last = step + 1 == flags_.steps();
      FSDP_RETURN_IF_ERROR(guard.EndStep(step + 1, is_last));
      if (!is_last && flags_.eval_every > 0 &&
          (step + 1) % flags_.eval_every == 0) {
        FSDP_RETURN_IF_ERROR(Evaluate(step + 1));
      }
    }
    return Evaluate(std::max(first_step_, flags_.steps()));
  }

  // Evaluates the model after `step`, unless the run is told to stop: the next
  // step, if there is one, saves and ends it.
  absl::Status Evaluate(int64_t step) {
    if (!eval_.has_value()) return absl::OkStatus();
    const absl::StatusOr<double> loss = trainer_->Evaluate(*eval_);
    if (absl::IsCancelled(loss.status())) return absl::OkStatus();
    FSDP_RETURN_IF_ERROR(loss.status());
    if (IsFirst()) progress_->Evaluated(step, *loss);
    return absl::OkStatus();
  }

  absl::Status Export() {
    if (!flags_.save_adapter.empty()) FSDP_RETURN_IF_ERROR(SaveAdapter());
    if (flags_.export_dir.empty()) return absl::OkStatus();
    if (first_step_ >= flags_.steps()) {
      const absl::Status is_new =
          Agree(IsFirst() ? CheckIsNew("export", flags_.export_dir)
                          : absl::OkStatus(),
                "exporting");
      if (absl::IsAlreadyExists(is_new)) {
        if (IsFirst()) {
          std::cout << flags_.export_dir << " is there already" << std::endl;
        }
        return absl::OkStatus();
      }
    }
    if (model_.int8_base.has_value()) FSDP_RETURN_IF_ERROR(MakeMergeable());
    FSDP_RETURN_IF_ERROR(ExportTrained(
        flags_.export_dir, texts_, model_.compute, model_made_, HasAdapters()));
    if (IsFirst()) std::cout << "wrote " << flags_.export_dir << std::endl;
    return absl::OkStatus();
  }

  // Adapters that are there already are taken for this run's if they have its
  // values and it has not trained since.
  absl::Status SaveAdapter() {
    absl::Status saved = fsdp::adapters::SaveAdapter(
        flags_.save_adapter, *model_made_, *model_.lora);
    if (!absl::IsAlreadyExists(saved) || first_step_ < flags_.steps()) {
      return saved;
    }
    const auto mine = TrainedValues();
    const absl::Status loaded = fsdp::adapters::LoadAdapter(
        flags_.save_adapter, *model_made_, *model_.lora);
    const auto theirs = TrainedValues();
    const bool same =
        loaded.ok() && mine.ok() && theirs.ok() &&
        absl::c_equal(*mine, *theirs, [](const auto& one, const auto& other) {
          return at::equal(one, other);
        });
    return Agree(same ? loaded : saved, "comparing adapters");
  }

  // Returns copies of what this rank has of the adapters.
  absl::StatusOr<std::vector<at::Tensor>> TrainedValues() const {
    std::vector<at::Tensor> values;
    for (const fsdp::TensorRange& named : model_made_->Ranges()) {
      if (!named.values.requires_grad()) continue;
      FSDP_ASSIGN_OR_RETURN(const fsdp::Resident resident,
                            fsdp::Resident::Of(named.values, fsdp::Use::kRead));
      values.push_back(named.values.detach().clone());
    }
    return values;
  }

  // Replaces the base in int8, whose memory is needed, by the weights of the
  // files, with the adapters on them. Nothing is trained with it, so that no
  // options are chosen.
  absl::Status MakeMergeable() {
    trainer_.reset();
    model_made_ = Model(nullptr);
    model_.int8_base.reset();
    model_.automatic.reset();
    FSDP_ASSIGN_OR_RETURN(model_made_, MakeModel(config_, model_, ranks_));
    FSDP_RETURN_IF_ERROR(LoadBase(flags_.model, config_, *model_made_));
    return fsdp::adapters::LoadAdapter(flags_.save_adapter, *model_made_,
                                       *model_.lora);
  }

  const TrainFlags& flags_;
  const c10::Device device_;
  const std::shared_ptr<Communicator> ranks_;
  const fsdp::DeviceGraphMaker& make_graph_;
  LlamaConfig config_{};
  std::map<std::string, std::string> texts_;  // from beside the weights
  ModelOptions model_;
  std::optional<TokenBatches> data_;
  std::optional<EvaluationBatches> eval_;
  int64_t num_rows_ = 0;
  std::optional<Progress> progress_;  // on rank 0
  Model model_made_{nullptr};
  std::optional<Trainer> trainer_;
  fsdp::checkpoint::TrainingRun run_;
  std::unique_ptr<fsdp::checkpoint::Checkpointer> checkpoints_;
  int64_t first_step_ = 0;
};

}  // namespace

absl::Status TrainRank(const TrainFlags& flags, c10::Device device,
                       const std::shared_ptr<Communicator>& ranks,
                       const fsdp::DeviceGraphMaker& make_graph) {
  const c10::DeviceGuard guard(device);
  FSDP_ASSIGN_OR_RETURN(const fsdp::comm::Environment environment,
                        fsdp::comm::ReadEnvironment(std::getenv));
  at::set_num_threads(flags.threads > 0 ? flags.threads
                                        : fsdp::comm::ThreadsPerRank(
                                              environment.local_world_size));
  return TrainRun(flags, device, ranks, make_graph).Run();
}

int TrainProgram(int argc, char** argv, const fsdp::comm::NcclOn& nccl_on,
                 const fsdp::DeviceGraphMaker& make_graph) {
  const fsdp::comm::StopRequest stop;
  const absl::StatusOr<TrainFlags> flags = ReadTrainFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return fsdp::comm::kUsageErrorExitCode;
  }
  fsdp::comm::RestartOptions restarts;
  restarts.max_restarts = flags->max_restarts;
  restarts.progress = [&flags]() -> int64_t {
    const auto step = fsdp::checkpoint::NewestStep(flags->save);
    return step.ok() ? step->value_or(-1) : -1;
  };
  const absl::StatusOr<fsdp::comm::DeviceChoice> device =
      fsdp::comm::ChooseDeviceOfProcess(flags->device, flags->ranks, nccl_on);
  if (!device.ok()) {
    std::cerr << "--device: " << device.status().message() << std::endl;
    return fsdp::comm::kUsageErrorExitCode;
  }
  fsdp::comm::ConnectOptions connect;
  connect.device = device->connect;
  return fsdp::comm::RunRanks(
      argc, argv, flags->ranks,
      [&](const std::shared_ptr<Communicator>& ranks) {
        return TrainRank(*flags, device->device, ranks, make_graph);
      },
      connect, restarts);
}

}  // namespace llama
