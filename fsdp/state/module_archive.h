// Writes and reads state dicts as archives of torch::save() and torch::load().
#ifndef FSDP_STATE_MODULE_ARCHIVE_H_
#define FSDP_STATE_MODULE_ARCHIVE_H_

#include <torch/nn/module.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <string>

#include "absl/status/status.h"
#include "fsdp/state/whole_model.h"

namespace fsdp {

// Writes `dict`, which has the names of `module`, as torch::save() writes the
// unsharded module.
void WriteArchive(const torch::nn::Module& module, const StateDict& dict,
                  const std::string& prefix,
                  torch::serialize::OutputArchive& archive);

// Writes it into a file, which appears at `path` when it is complete.
absl::Status WriteArchiveFile(const torch::nn::Module& module,
                              const StateDict& dict, const std::string& path);

// Adds the parameters and buffers of `module` that are in `archive` to `dict`.
void ReadArchive(const torch::nn::Module& module, const std::string& prefix,
                 torch::serialize::InputArchive& archive, StateDict& dict);

}  // namespace fsdp

#endif  // FSDP_STATE_MODULE_ARCHIVE_H_
