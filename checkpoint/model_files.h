// A model alone, in the files that everybody reads: Hugging Face's.
//
//   auto model = fsdp::FullyShard(net, ranks, options);   // also DeferredInit
//   status = fsdp::checkpoint::LoadModel("/models/llama", *model);
//   ...
//   status = fsdp::checkpoint::ExportModel("/models/mine", *model);
//
// Each rank of a sharded model reads and writes its own ranges of the files; no
// rank ever has the whole model. Checkpoints to go on from, with the optimizer,
// are those of checkpointer.h.
#ifndef CHECKPOINT_MODEL_FILES_H_
#define CHECKPOINT_MODEL_FILES_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "checkpoint/load/tensor_recipe.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

class FileSystem;

struct LoadModelOptions {
  // Refuse names that are missing in the files or in the model.
  bool strict = true;
  // From other names and layouts, such as transposes and fused projections, to
  // the model's. Null: each tensor as it is, by its own name.
  TensorMapping mapping = nullptr;
  // Gets the bytes that this rank has read, and all that it has to. May be
  // null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
  // Limits each wait for other ranks.
  absl::Duration timeout = absl::Minutes(30);
  // Null: the machine's. Outlives the call.
  FileSystem* files = nullptr;
};

// Fills the parameters and buffers of `module`, which may be sharded. `path`: a
// safetensors file; an index; or a folder with an index, "model.safetensors" or
// files of ranks. tools/interop/dcp.py makes one of what PyTorch has saved
// otherwise. Floating-point values are cast to the model's dtypes. A module
// made under DeferredInit that is not sharded gets its values first.
//
// Collective where the module is sharded: what one rank cannot do all return,
// "rank 2: " in front. NotFound: no such files. InvalidArgument, with nothing
// changed, lists all that does not fit. The model may be filled in part by
// errors that name the file: DataLoss: it is cut off, or, in a checkpoint of
// ours, not what its checksum says; InvalidArgument: a cast would make a finite
// value infinite.
absl::Status LoadModel(const std::string& path, torch::nn::Module& module,
                       const LoadModelOptions& options = LoadModelOptions());

// All ranks pass the same.
struct ExportOptions {
  // The dtype that floating-point parameters and buffers have in the files;
  // unset: their own.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  // The name in the files of a parameter or buffer; nothing: it is left out.
  // Null: all, by their names.
  std::function<std::optional<std::string>(const std::string& name)> names =
      nullptr;
  // The names of a folder's files begin with it.
  std::string stem = "model";
  // A folder's files are no larger, but for that of a single larger tensor.
  int64_t max_file_bytes = 5'000'000'000;
  // Rank 0 writes these small files beside a folder's model, by name:
  // {"config.json", ...}.
  std::map<std::string, std::string> texts = {};
  // Those that call, where the module is not sharded and several do; then rank
  // 0's values count. A sharded module has its own.
  comm::Communicator* ranks = nullptr;
  // Limits each wait for other ranks, and for the disk.
  absl::Duration timeout = absl::Minutes(30);
  // Null: the machine's. Outlives the call.
  FileSystem* files = nullptr;
};

// Refuses what ExportModel() would refuse of `folder` itself, to be asked
// before a long training instead of after it: it is there already, it is a link
// to nothing, or its parent is missing, is a file or cannot be written. Not
// collective: one rank asks, and all comm::Agree() on its answer, since the
// others would go on alone.
absl::Status CheckCanExport(const std::string& folder);

// A new folder with the model as Hugging Face has it: "model.safetensors", or
// several files and an index, and `texts`. Ranks write at once, into
// "FOLDER.incomplete", which gets its name when all of it is on the disk; the
// folder that it is in has to exist. What a killed call has left under that
// name is replaced. Collective; errors as those of LoadModel(), and then
// nothing is left, or the text says that it is there (files/new_path.h).
// AlreadyExists: there is something of that name. FailedPrecondition: another
// call writes there. InvalidArgument: two tensors of one name in the files.
absl::Status ExportModel(const std::string& folder, torch::nn::Module& module,
                         const ExportOptions& options = ExportOptions());

// The same as one safetensors file, which is replaced, whole, if there is one.
absl::Status ExportFile(const std::string& path, torch::nn::Module& module,
                        const ExportOptions& options = ExportOptions());

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_MODEL_FILES_H_
