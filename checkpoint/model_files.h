// Loads and exports a model alone, in Hugging Face's files.
//
//   auto model = fsdp::FullyShard(net, ranks, options);   // also DeferredInit
//   status = fsdp::checkpoint::LoadModel("/models/llama", *model);
//   ...
//   status = fsdp::checkpoint::ExportModel("/models/mine", *model);
//
// Each rank of a sharded model reads and writes its own ranges of the files; no
// rank ever has the whole model. checkpointer.h is for checkpoints of runs,
// with the optimizer.
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

namespace fsdp {
class FileSystem;
}  // namespace fsdp

namespace fsdp::checkpoint {

// Options of LoadModel(). All ranks pass the same, but for `progress` and
// `files`.
struct LoadModelOptions {
  // If true, names that the files or the model lack are refused.
  bool strict = true;
  // Tensors of the files for which this returns true may be unexpected all the
  // same: constants that older releases have saved. Null: none may.
  std::function<bool(const std::string& name)> ignored = nullptr;
  // Maps files with other names and layouts, such as transposes and fused
  // projections, to the model's tensors. If null, each tensor is read as it is,
  // by its own name.
  TensorMapping mapping = nullptr;
  // Called with the bytes that this rank has read, and all that it has to read.
  // May be null.
  std::function<void(int64_t done, int64_t all)> progress = nullptr;
  // Limits each wait for other ranks.
  absl::Duration timeout = absl::Minutes(30);
  // If null, the machine's file system. Outlives the call.
  FileSystem* files = nullptr;
};

// Fills the parameters and buffers of `module`, which may be sharded. `path` is
// a safetensors file, an index, or a folder with an index, "model.safetensors"
// or files of ranks; tools/interop/dcp.py makes one of what PyTorch has saved
// otherwise. Floating-point values are cast to the model's dtypes. A module
// that was made under DeferredInit and is not sharded gets its initial values
// first.
//
// Collective if the module is sharded: if one rank fails, all return its error
// with "rank 2: " in front. NotFound: there are no such files. InvalidArgument,
// with nothing changed, lists all that does not fit. Errors that name the file
// may leave the model partly filled: DataLoss if it is cut off or, in a
// checkpoint of ours, differs from its checksum; InvalidArgument if a cast
// would make a finite value infinite.
absl::Status LoadModel(const std::string& path, torch::nn::Module& module,
                       const LoadModelOptions& options = LoadModelOptions());

// Options of ExportModel(). All ranks pass the same.
struct ExportOptions {
  // The dtype of floating-point parameters and buffers in the files; unset:
  // their own.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  // Returns the name in the files of a parameter or buffer, or nothing to leave
  // it out. If null, all are exported by their own names.
  std::function<std::optional<std::string>(const std::string& name)> names =
      nullptr;
  // The names of a folder's model files begin with this.
  std::string stem = "model";
  // No file of a folder is larger, unless it is a single larger tensor.
  int64_t max_file_bytes = 5'000'000'000;
  // Small files that rank 0 writes beside the model's in a folder, by name:
  // {"config.json", ...}. Those of other ranks do not count.
  std::map<std::string, std::string> texts = {};
  // The ranks that call, if the module is not sharded and several ranks do;
  // rank 0's values are written. A sharded module has its own ranks.
  comm::Communicator* ranks = nullptr;
  // Limits each wait for other ranks, which includes their work on the disk.
  absl::Duration timeout = absl::Minutes(30);
  // If null, the machine's file system. Outlives the call.
  FileSystem* files = nullptr;
};

// Returns the error that ExportModel() would return because of `folder` itself,
// for a long training to ask before it begins: it exists, it is a link to
// nothing, or its parent is missing, is a file or cannot be written. Not
// collective: one rank asks, and all comm::Agree() on its answer, since the
// others would go on alone.
absl::Status CheckCanExport(const std::string& folder);

// Writes the model as Hugging Face has it into a new folder:
// "model.safetensors" or several files and an index, and `texts`. Collective;
// all ranks write, into "FOLDER.incomplete", which is renamed when all of it is
// on the disk, and replaces what a killed call has left there. The parent
// folder must exist. Errors are those of LoadModel() and leave nothing, unless
// the text says so (base/files/file_system.h). AlreadyExists: there is
// something of that name. FailedPrecondition: another call writes there.
// InvalidArgument: two tensors have one name in the files.
absl::Status ExportModel(const std::string& folder, torch::nn::Module& module,
                         const ExportOptions& options = ExportOptions());

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_MODEL_FILES_H_
