// A run handed to PyTorch: model and optimizer as torch.distributed.checkpoint
// (DCP) keeps them.
//
//   status = fsdp::checkpoint::ExportDcp("/runs/mine-dcp", run);
//
// and in Python, with any number of ranks:
//
//   model_state, optim_state = get_state_dict(model, optimizer)
//   dcp.load({"model": model_state, "optim": optim_state},
//            checkpoint_id="/runs/mine-dcp")
//   set_state_dict(model, optimizer, model_state_dict=model_state,
//                  optim_state_dict=optim_state)
//
// The other way: LoadModel() (model_files.h) reads the model of such a folder.
#ifndef CHECKPOINT_DCP_FILES_H_
#define CHECKPOINT_DCP_FILES_H_

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

class FileSystem;

// All ranks pass the same.
struct ExportDcpOptions {
  // Names as torchtitan has them: "NAME", "optimizer.state.NAME.exp_avg",
  // "optimizer.param_groups.NAME.lr". Otherwise those of above: "model.NAME",
  // "optim.state.NAME.exp_avg", "optim.param_groups.0.lr".
  bool torchtitan = false;
  // Of floating-point parameters and buffers in the files; unset: their own.
  std::optional<c10::ScalarType> model_dtype = std::nullopt;
  // Those that call, where the model is not sharded and several do; then rank
  // 0's values count. A sharded model has its own.
  comm::Communicator* ranks = nullptr;
  // Of each wait for other ranks, and for the disk.
  absl::Duration timeout = absl::Minutes(30);
  // Null: the machine's. Outlives the call.
  FileSystem* files = nullptr;
};

// Writes the model and the optimizer of `run`, if there is one, into a new
// folder: `.metadata`, and a file for each rank. Schedulers, scaler and random
// states are not among them. The folder is whole or not there; the one that it
// is in has to exist. Collective; what one rank cannot do all return, "rank 2:
// " in front. AlreadyExists: there is something of that name.
// FailedPrecondition: another call writes there. InvalidArgument: an optimizer
// of another class than SGD, Adam, AdamW, Adagrad and RMSprop, or a dtype that
// PyTorch lacks.
absl::Status ExportDcp(const std::string& folder, const TrainingRun& run,
                       const ExportDcpOptions& options = ExportDcpOptions());

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_FILES_H_
