// A run handed to PyTorch, or taken over from there: model and optimizer as
// torch.distributed.checkpoint (DCP) keeps them.
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
// The other way, of what Python has saved by
//
//   model_state, optim_state = get_state_dict(model, optimizer)
//   dcp.save({"model": model_state, "optim": optim_state},
//            checkpoint_id="/runs/theirs")
//
// or, as in PyTorch's tutorial, in an item of their own ({"app": {"model": ...,
// "optim": ...}}), or as torchtitan does:
//
//   status = fsdp::checkpoint::LoadDcp("/runs/theirs", run);
//
// LoadModel() (model_files.h) reads the model alone.
#ifndef CHECKPOINT_DCP_FILES_H_
#define CHECKPOINT_DCP_FILES_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
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

struct LoadDcpOptions {
  // Refuse names that are missing in the files or in the run, groups of other
  // parameters, and options of groups that LibTorch's optimizer lacks.
  bool strict = true;
  // Of this rank: bytes read, of all that it has to read. May be null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
  // Of each wait for other ranks.
  absl::Duration timeout = absl::Minutes(30);
  // Null: the machine's. Outlives the call.
  FileSystem* files = nullptr;
};

// Fills the model of `run`, and, if there is one, the optimizer: its states,
// their steps, and the options of its groups. Of ExportDcp(), of FSDP2 and of
// torchtitan; by any number of ranks, in any strategy and tier. All else of
// `run` stays as it is: schedulers, scaler, random states, entries. Nothing
// that the files are pickled as is executed.
//
// The optimizer is of the class that has the same name in torch.optim. Options
// that its groups have there and not here are passed over where they do not
// change what a step computes, such as `fused`; others are refused by name,
// such as `maximize`. Flattened groups, as of torchtitan, become those that
// the optimizer has here.
//
// Collective where the model is sharded; what one rank cannot do all return,
// "rank 2: " in front. NotFound: no such folder, or a file of it is missing.
// InvalidArgument, with nothing changed: a damaged file; what does not fit, all
// of the model's, of the optimizer's groups or of one kind of its states in a
// list; no optimizer in the files, or one as Megatron keeps it. DataLoss,
// naming the file: it has been cut off meanwhile; the run may be filled in
// part.
absl::Status LoadDcp(const std::string& folder, const TrainingRun& run,
                     const LoadDcpOptions& options = LoadDcpOptions());

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_FILES_H_
