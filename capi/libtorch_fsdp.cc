#include "capi/libtorch_fsdp.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/model_files.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/script_module.h"

// NOLINTNEXTLINE(readability-identifier-naming): as C has it.
struct fsdp_ranks {
  std::shared_ptr<fsdp::comm::Communicator> communicator;
};

// NOLINTNEXTLINE(readability-identifier-naming): as C has it.
struct fsdp_model {
  std::shared_ptr<fsdp::comm::Communicator> ranks;
  fsdp::FullyShardedDataParallel<fsdp::ScriptModuleImpl> sharded;
  std::unique_ptr<fsdp::FusedAdamW> optimizer = nullptr;
  at::Tensor output = {};  // of the last forward; undefined before
  // The folder that was used last.
  std::unique_ptr<fsdp::checkpoint::Checkpointer> checkpoints = nullptr;
};

// The arguments of C as values of C++; errors name what is wrong.
namespace fsdp {
namespace {

constexpr std::pair<int32_t, at::ScalarType> kDtypes[] = {
    {FSDP_FLOAT32, at::kFloat}, {FSDP_FLOAT64, at::kDouble},
    {FSDP_FLOAT16, at::kHalf},  {FSDP_BFLOAT16, at::kBFloat16},
    {FSDP_INT32, at::kInt},     {FSDP_INT64, at::kLong},
    {FSDP_UINT8, at::kByte},    {FSDP_BOOL, at::kBool},
};

absl::StatusOr<at::ScalarType> ScalarTypeOf(int32_t dtype) {
  for (const auto& [ours, torchs] : kDtypes) {
    if (ours == dtype) return torchs;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype ", dtype, ": expected FSDP_FLOAT32 = ", FSDP_FLOAT32,
                   " to FSDP_BOOL = ", FSDP_BOOL));
}

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<at::Tensor> CopyOf(const fsdp_tensor& given) {
  FSDP_ASSIGN_OR_RETURN(const at::ScalarType dtype, ScalarTypeOf(given.dtype));
  if (given.ndim < 0 || given.ndim > FSDP_MAX_DIMS) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ndim is ", given.ndim, ": expected 0 to ", FSDP_MAX_DIMS));
  }
  if (given.sizes == nullptr && given.ndim > 0) {
    return absl::InvalidArgumentError("sizes is null");
  }
  const at::IntArrayRef sizes(given.sizes, given.ndim);
  auto bytes = static_cast<int64_t>(at::elementSize(dtype));
  for (int64_t size : sizes) {
    if (size < 0 || c10::mul_overflows(bytes, size, &bytes)) {
      return absl::InvalidArgumentError(
          "a size is negative, or their product too large");
    }
  }
  if (bytes == 0) return at::empty(sizes, dtype);
  if (given.data == nullptr) {
    return absl::InvalidArgumentError("data is null");
  }
  return at::from_blob(const_cast<void*>(given.data), sizes, dtype).clone();
}

absl::StatusOr<int32_t> DtypeOf(at::ScalarType type) {
  for (const auto& [ours, torchs] : kDtypes) {
    if (torchs == type) return ours;
  }
  return absl::UnimplementedError(
      absl::StrCat("C has no number for the dtype ", c10::toString(type)));
}

// `address` may be null.
absl::StatusOr<comm::Environment> EnvironmentOf(int rank, int world_size,
                                                const char* address) {
  comm::Environment environment;
  environment.rank = rank;
  environment.world_size = world_size;
  environment.secret = Variable("FSDP_JOB_SECRET");
  environment.interface = Variable("GLOO_SOCKET_IFNAME");
  environment.inspection_folder = Variable("FSDP_INSPECT_DIR");
  if (address == nullptr) return environment;
  if (comm::SplitPlace(address, &environment.master_addr,
                       &environment.master_port)) {
    return environment;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", address,
                   "\": expected host:port, as in node1:29500 or [::1]:29500"));
}

absl::StatusOr<torch::jit::Module> LoadScript(const char* path) {
  if (access(path, R_OK) != 0) return absl::ErrnoToStatus(errno, path);
  std::optional<torch::jit::Module> script;
  const absl::Status loaded = TorchToStatus(
      absl::StrCat("loading ", path),
      [&] { script = torch::jit::load(std::string(path), at::kCPU); });
  // LibTorch does not tell a file that is not TorchScript from a bug.
  if (absl::IsInternal(loaded)) {
    return absl::InvalidArgumentError(loaded.message());
  }
  FSDP_RETURN_IF_ERROR(loaded);
  return *script;
}

// Takes all but the units, which are those of a script.
absl::StatusOr<Options> OptionsOf(const fsdp_model_options& given) {
  if (given.version != FSDP_MODEL_OPTIONS_VERSION) {
    return absl::InvalidArgumentError(
        absl::StrCat("fsdp_model_options::version is ", given.version,
                     ": this library knows ", FSDP_MODEL_OPTIONS_VERSION));
  }
  Options options;
  if (given.compute_dtype != FSDP_AS_STORED) {
    FSDP_ASSIGN_OR_RETURN(const at::ScalarType dtype,
                          ScalarTypeOf(given.compute_dtype));
    options.unit.precision = ComputeIn(dtype);
  }
  return options;
}

// InvalidArgument: `script` has no module of a type that `unit_types` names.
absl::StatusOr<WrapPolicy> UnitsOf(const char* unit_types,
                                   const torch::jit::Module& script) {
  std::set<std::string> known;
  for (const torch::jit::Module& module : script.modules()) {
    known.insert(module.type()->name()->name());
  }
  std::vector<std::string> types =
      absl::StrSplit(unit_types, ',', absl::SkipWhitespace());
  for (std::string& type : types) {
    absl::StripAsciiWhitespace(&type);
    if (known.count(type) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("fsdp_model_options::unit_types names \"", type,
                       "\": the script has ", absl::StrJoin(known, ", ")));
    }
  }
  return WrapScriptModules(std::move(types));
}

// The copies have memory of their own.
absl::StatusOr<std::vector<c10::IValue>> CopiesOf(const fsdp_tensor* inputs,
                                                  int num_inputs) {
  if (num_inputs < 0) {
    return absl::InvalidArgumentError("num_inputs is negative");
  }
  std::vector<c10::IValue> copies;
  for (int i = 0; i < num_inputs; ++i) {
    const absl::StatusOr<at::Tensor> copy = CopyOf(inputs[i]);
    if (!copy.ok()) {
      return Annotate(copy.status(), absl::StrCat("input ", i));
    }
    copies.emplace_back(*copy);
  }
  return copies;
}

}  // namespace
}  // namespace fsdp

namespace {

std::string& LastError() {
  thread_local std::string text;
  return text;
}

// Runs the body `fn` of the function `name`, unless one of its `pointers` is
// null, and keeps the text of its error. Nothing is thrown.
int Call(absl::string_view name, absl::Span<const void* const> pointers,
         fsdp::FallibleRef fn) noexcept {
  try {
    absl::Status status;
    if (absl::c_linear_search(pointers, nullptr)) {
      status =
          absl::InvalidArgumentError(absl::StrCat(name, ": a pointer is null"));
    } else {
      status = fsdp::TorchToStatus(name, fn);
    }
    if (!status.ok()) {
      LastError() = status.ToString(absl::StatusToStringMode::kWithNoExtraData);
    }
    return status.raw_code();
  } catch (...) {  // no memory for the text, or not a std::exception
    LastError().clear();
    return FSDP_UNKNOWN;
  }
}

absl::Status Connect(const absl::StatusOr<fsdp::comm::Environment>& environment,
                     double timeout_seconds, fsdp_ranks** ranks) {
  FSDP_RETURN_IF_ERROR(environment.status());
  if (!(timeout_seconds > 0) || std::isinf(timeout_seconds)) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout_seconds is ", timeout_seconds,
                     ": expected a positive and finite number"));
  }
  fsdp::comm::ConnectOptions options;
  options.timeout = absl::Seconds(timeout_seconds);
  options.connect_timeout = options.timeout;
  FSDP_ASSIGN_OR_RETURN(auto communicator,
                        fsdp::comm::Connect(*environment, options));
  *ranks = new fsdp_ranks{std::move(communicator)};
  return absl::OkStatus();
}

absl::Status LoadModel(const fsdp_ranks& ranks, const char* path,
                       const fsdp_model_options* given, fsdp_model** model) {
  fsdp::comm::Communicator& communicator = *ranks.communicator;
  std::optional<torch::jit::Module> script;
  auto options = [&]() -> absl::StatusOr<fsdp::Options> {
    fsdp::Options options;
    // Before the script is read, which may take long.
    if (given != nullptr) {
      FSDP_ASSIGN_OR_RETURN(options, fsdp::OptionsOf(*given));
    }
    FSDP_ASSIGN_OR_RETURN(script, fsdp::LoadScript(path));
    const char* units = given == nullptr ? nullptr : given->unit_types;
    if (units != nullptr && *units != '\0') {
      FSDP_ASSIGN_OR_RETURN(options.wrap_policy, fsdp::UnitsOf(units, *script));
    }
    return options;
  }();
  FSDP_RETURN_IF_ERROR(
      fsdp::comm::Agree(communicator, options.status(), "loading of a script",
                        absl::Now() + communicator.default_timeout()));
  FSDP_ASSIGN_OR_RETURN(
      auto sharded, fsdp::FullyShard(*script, ranks.communicator, *options));
  *model = new fsdp_model{ranks.communicator, std::move(sharded)};
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> OutputOf(const fsdp_model& model) {
  if (model.output.defined()) return model.output;
  return absl::FailedPreconditionError(
      "there is no output: call fsdp_model_forward()");
}

absl::StatusOr<fsdp::FusedAdamW*> OptimizerOf(const fsdp_model& model) {
  if (model.optimizer != nullptr) return model.optimizer.get();
  return absl::FailedPreconditionError(
      "there is no optimizer: call fsdp_model_use_adamw()");
}

// Opens `folder`, unless it is the one that is open.
absl::StatusOr<fsdp::checkpoint::Checkpointer*> CheckpointsIn(
    const char* folder, fsdp_model* model) {
  if (model->checkpoints == nullptr || model->checkpoints->folder() != folder) {
    model->checkpoints = nullptr;  // it may be the same by another name
    FSDP_ASSIGN_OR_RETURN(
        model->checkpoints,
        fsdp::checkpoint::Checkpointer::Open(folder, model->ranks));
  }
  return model->checkpoints.get();
}

fsdp::checkpoint::TrainingRun RunOf(fsdp_model* model) {
  fsdp::checkpoint::TrainingRun run;
  run.model = model->sharded.get();
  run.optimizer = model->optimizer.get();
  return run;
}

}  // namespace

const char* fsdp_version(void) { return FSDP_VERSION; }

const char* fsdp_last_error(void) { return LastError().c_str(); }

int fsdp_ranks_connect_from_environment(double timeout_seconds,
                                        fsdp_ranks** ranks) {
  return Call(__func__, {ranks}, [&] {
    return Connect(fsdp::comm::ReadEnvironment(std::getenv), timeout_seconds,
                   ranks);
  });
}

int fsdp_ranks_connect(int rank, int world_size, const char* address,
                       double timeout_seconds, fsdp_ranks** ranks) {
  return Call(__func__, {ranks}, [&] {
    return Connect(fsdp::EnvironmentOf(rank, world_size, address),
                   timeout_seconds, ranks);
  });
}

int fsdp_ranks_rank(const fsdp_ranks* ranks, int* rank) {
  return Call(__func__, {ranks, rank},
              [&] { *rank = ranks->communicator->rank(); });
}

int fsdp_ranks_size(const fsdp_ranks* ranks, int* size) {
  return Call(__func__, {ranks, size},
              [&] { *size = ranks->communicator->world_size(); });
}

int fsdp_ranks_barrier(fsdp_ranks* ranks) {
  return Call(__func__, {ranks}, [&] {
    fsdp::comm::Communicator& communicator = *ranks->communicator;
    return fsdp::comm::Barrier(communicator, "fsdp_ranks_barrier",
                               absl::Now() + communicator.default_timeout());
  });
}

int fsdp_ranks_mean(fsdp_ranks* ranks, double value, double* mean) {
  return Call(__func__, {ranks, mean}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(*mean, fsdp::comm::Mean(*ranks->communicator, value));
    return absl::OkStatus();
  });
}

int fsdp_ranks_destroy(fsdp_ranks* ranks) {
  return Call(__func__, {}, [&] { delete ranks; });
}

int fsdp_model_load(fsdp_ranks* ranks, const char* path,
                    const fsdp_model_options* options, fsdp_model** model) {
  return Call(__func__, {ranks, path, model},
              [&] { return LoadModel(*ranks, path, options, model); });
}

int fsdp_model_destroy(fsdp_model* model) {
  return Call(__func__, {}, [&] { delete model; });
}

int fsdp_model_set_training(fsdp_model* model, int training) {
  return Call(__func__, {model},
              [&] { model->sharded->module()->train(training != 0); });
}

int fsdp_model_forward(fsdp_model* model, const fsdp_tensor* inputs,
                       int num_inputs) {
  const void* first = inputs;
  if (num_inputs == 0) first = model;  // then it may be null
  return Call(__func__, {model, first}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(std::vector<c10::IValue> copies,
                          fsdp::CopiesOf(inputs, num_inputs));
    model->output = at::Tensor();
    const c10::AutoGradMode mode(model->sharded->module()->is_training());
    const c10::IValue output = model->sharded->forward(std::move(copies));
    if (!output.isTensor()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the script returns ", output.tagKind(), ": expected one tensor"));
    }
    model->output = output.toTensor();
    return absl::OkStatus();
  });
}

int fsdp_model_loss(const fsdp_model* model, double* loss) {
  return Call(__func__, {model, loss}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor output, OutputOf(*model));
    if (output.numel() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the output has ", output.numel(),
                       " elements: expected a loss of one"));
    }
    *loss = output.item<double>();
    return absl::OkStatus();
  });
}

int fsdp_model_output_shape(const fsdp_model* model, int32_t* dtype,
                            int32_t* ndim, int64_t* sizes) {
  return Call(__func__, {model, dtype, ndim, sizes}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor output, OutputOf(*model));
    FSDP_ASSIGN_OR_RETURN(const int32_t number,
                          fsdp::DtypeOf(output.scalar_type()));
    if (output.dim() > FSDP_MAX_DIMS) {
      return absl::UnimplementedError(
          absl::StrCat("the output has ", output.dim(),
                       " dimensions, more than ", FSDP_MAX_DIMS));
    }
    *dtype = number;
    *ndim = static_cast<int32_t>(output.dim());
    absl::c_copy(output.sizes(), sizes);
    return absl::OkStatus();
  });
}

int fsdp_model_output(const fsdp_model* model, int64_t bytes, void* data) {
  return Call(__func__, {model, data}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(at::Tensor output, OutputOf(*model));
    output = output.contiguous();
    if (static_cast<size_t>(bytes) != output.nbytes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "bytes is ", bytes, ": the output has ", output.nbytes()));
    }
    std::memcpy(data, output.const_data_ptr(), output.nbytes());
    return absl::OkStatus();
  });
}

int fsdp_model_backward(fsdp_model* model) {
  return Call(__func__, {model}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor loss, OutputOf(*model));
    FSDP_RETURN_IF_ERROR(model->sharded->Backward(loss));
    model->output = loss.detach();
    return absl::OkStatus();
  });
}

int fsdp_model_clip_grad_norm(fsdp_model* model, double max_norm,
                              double* norm) {
  return Call(__func__, {model}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const at::Tensor before,
                          model->sharded->ClipGradNorm(max_norm));
    if (norm != nullptr) *norm = before.item<double>();
    return absl::OkStatus();
  });
}

int fsdp_model_use_adamw(fsdp_model* model, double learning_rate, double beta1,
                         double beta2, double eps, double weight_decay) {
  return Call(__func__, {model}, [&] {
    model->optimizer = std::make_unique<fsdp::FusedAdamW>(
        model->sharded->Parameters(), torch::optim::AdamWOptions(learning_rate)
                                          .betas({beta1, beta2})
                                          .eps(eps)
                                          .weight_decay(weight_decay));
  });
}

int fsdp_model_set_learning_rate(fsdp_model* model, double learning_rate) {
  return Call(__func__, {model}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto* const optimizer, OptimizerOf(*model));
    if (!(learning_rate >= 0 && std::isfinite(learning_rate))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the rate is ", learning_rate, ": expected a number from 0 on"));
    }
    for (auto& group : optimizer->param_groups()) {
      group.options().set_lr(learning_rate);
    }
    return absl::OkStatus();
  });
}

int fsdp_model_step(fsdp_model* model) {
  return Call(__func__, {model}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto* const optimizer, OptimizerOf(*model));
    optimizer->step();
    model->sharded->zero_grad();
    return absl::OkStatus();
  });
}

int fsdp_model_save(fsdp_model* model, const char* folder, int64_t step) {
  return Call(__func__, {model, folder}, [&]() -> absl::Status {
    if (step < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", step, ": expected 0 or more"));
    }
    FSDP_ASSIGN_OR_RETURN(auto* const checkpoints,
                          CheckpointsIn(folder, model));
    return checkpoints->Save(step, RunOf(model));
  });
}

int fsdp_model_resume(fsdp_model* model, const char* folder, int64_t* step) {
  return Call(__func__, {model, folder, step}, [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto* const checkpoints,
                          CheckpointsIn(folder, model));
    fsdp::checkpoint::TrainingRun run = RunOf(model);
    FSDP_ASSIGN_OR_RETURN(const auto newest, checkpoints->LoadLatest(run));
    *step = newest.value_or(-1);
    return absl::OkStatus();
  });
}

int fsdp_model_export(fsdp_model* model, const char* folder) {
  return Call(__func__, {model, folder}, [&] {
    return fsdp::checkpoint::ExportModel(folder, *model->sharded);
  });
}
