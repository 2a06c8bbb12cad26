// State dicts as the archives that torch::save() and torch::load() use.
#ifndef FSDP_STATE_MODULE_ARCHIVE_H_
#define FSDP_STATE_MODULE_ARCHIVE_H_

#include <torch/nn/module.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <string>

#include "absl/status/status.h"
#include "fsdp/state/state_dict.h"

namespace fsdp {

// Writes `dict` as `module`, whose names it has, would be written unsharded.
void WriteArchive(const torch::nn::Module& module, const StateDict& dict,
                  const std::string& prefix,
                  torch::serialize::OutputArchive& archive);

// The same into a file, which appears at `path` once it is whole.
absl::Status WriteArchiveFile(const torch::nn::Module& module,
                              const StateDict& dict, const std::string& path);

// Adds what `archive` has of the parameters and buffers of `module` to `dict`.
void ReadArchive(const torch::nn::Module& module, const std::string& prefix,
                 torch::serialize::InputArchive& archive, StateDict& dict);

}  // namespace fsdp

#endif  // FSDP_STATE_MODULE_ARCHIVE_H_
