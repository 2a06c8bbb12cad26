#include "fsdp/state/module_archive.h"

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp {

void WriteArchive(const torch::nn::Module& module, const StateDict& dict,
                  const std::string& prefix,
                  torch::serialize::OutputArchive& archive) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    const at::Tensor* value = dict.find(prefix + item.key());
    if (value != nullptr) archive.write(item.key(), *value);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    const at::Tensor* value = dict.find(prefix + item.key());
    if (value != nullptr) {
      archive.write(item.key(), *value, /*is_buffer=*/true);
    }
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    WriteArchive(*child.value(), dict, prefix + child.key() + ".", inner);
    archive.write(child.key(), inner);
  }
}

absl::Status WriteArchiveFile(const torch::nn::Module& module,
                              const StateDict& dict, const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(PartialFile file, PartialFile::Create(path));
  absl::Status written;
  const absl::Status thrown =
      TorchToStatus(absl::StrCat("writing ", path), [&] {
        torch::serialize::OutputArchive archive;
        WriteArchive(module, dict, /*prefix=*/"", archive);
        archive.save_to([&](const void* bytes, size_t count) {
          written.Update(file.Write(
              absl::string_view(static_cast<const char*>(bytes), count)));
          return written.ok() ? count : 0;
        });
      });
  // What LibTorch throws follows from it.
  FSDP_RETURN_IF_ERROR(written);
  FSDP_RETURN_IF_ERROR(thrown);
  return file.Publish();
}

void ReadArchive(const torch::nn::Module& module, const std::string& prefix,
                 torch::serialize::InputArchive& archive, StateDict& dict) {
  const auto read = [&](const std::string& name, bool is_buffer) {
    at::Tensor value;
    if (archive.try_read(name, value, is_buffer)) {
      dict.insert(prefix + name, value);
    }
  };
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    read(item.key(), /*is_buffer=*/false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    read(item.key(), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::InputArchive inner;
    if (archive.try_read(child.key(), inner)) {
      ReadArchive(*child.value(), prefix + child.key() + ".", inner, dict);
    }
  }
}

}  // namespace fsdp
