#include "checkpoint/run/rank_values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/tensor_info.h"
#include "checkpoint/run/run_values.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kRandom = "random.";
constexpr absl::string_view kEntry = "entry.";

// Of the CPU, and of `device` where that has one of its own.
std::vector<std::pair<std::string, at::Generator>> Generators(
    c10::Device device) {
  std::vector<std::pair<std::string, at::Generator>> generators = {
      {"cpu", at::detail::getDefaultCPUGenerator()}};
  if (device.is_cuda()) {
    generators.emplace_back("cuda",
                            at::globalContext().defaultGenerator(device));
  }
  return generators;
}

}  // namespace

std::string RankFileName(int rank) {
  return absl::StrFormat("ranks/rank-%05d.safetensors", rank);
}

std::string BuffersFileName(int rank) {
  return absl::StrFormat("ranks/buffers-%05d.safetensors", rank);
}

absl::StatusOr<std::string> Format(const SmallFile& file) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : file.tensors) {
    const std::optional<Dtype> dtype = FileDtype(tensor.scalar_type());
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", name, " is of dtype ", c10::toString(tensor.scalar_type()),
          ", which no safetensors file can hold"));
    }
    infos.push_back({name, *dtype, tensor.sizes().vec()});
  }
  FSDP_ASSIGN_OR_RETURN(const auto placed, PlaceTensors(infos));
  FSDP_ASSIGN_OR_RETURN(std::string bytes,
                        FormatSafetensorsHeader(placed, file.texts));
  const size_t data_begin = bytes.size();
  for (const PlacedTensor& tensor : placed) {
    if (tensor.end + data_begin > bytes.size()) {
      bytes.resize(tensor.end + data_begin);
    }
    const at::Tensor values = file.tensors.at(tensor.info.name).contiguous();
    if (values.numel() == 0) continue;
    std::memcpy(&bytes[data_begin + tensor.begin], values.const_data_ptr(),
                tensor.end - tensor.begin);
  }
  return bytes;
}

absl::StatusOr<SmallFile> ParseSmallFile(absl::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  FSDP_ASSIGN_OR_RETURN(
      const int64_t length,
      ParseSafetensorsLength(bytes.substr(0, kSafetensorsLengthBytes), size));
  FSDP_ASSIGN_OR_RETURN(
      const SafetensorsHeader header,
      ParseSafetensorsHeader(bytes.substr(kSafetensorsLengthBytes, length),
                             size));
  SmallFile file;
  file.texts = header.metadata;
  for (const PlacedTensor& tensor : header.tensors) {
    const auto dtype = TorchDtype(tensor.info.dtype);
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", tensor.info.name, " is of dtype ",
                       NameOf(tensor.info.dtype), ", which LibTorch lacks"));
    }
    const at::Tensor values = at::empty(tensor.info.shape, *dtype);
    if (values.numel() > 0) {
      std::memcpy(values.mutable_data_ptr(),
                  bytes.data() + header.data_begin + tensor.begin,
                  tensor.end - tensor.begin);
    }
    file.tensors[tensor.info.name] = values;
  }
  return file;
}

absl::StatusOr<SmallFile> TakeRankValues(const TrainingRun& run,
                                         c10::Device device) {
  SmallFile file;
  for (const auto& [name, text] : run.rank_entries) {
    file.texts[absl::StrCat(kEntry, name)] = text;
  }
  if (!run.random_state) return file;
  FSDP_RETURN_IF_ERROR(TorchToStatus("reading the random generators", [&] {
    for (auto& [name, generator] : Generators(device)) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      file.tensors[absl::StrCat(kRandom, name)] =
          at::Tensor(generator.unsafeGetGeneratorImpl()->get_state());
    }
  }));
  return file;
}

absl::Status RestoreRankValues(const SmallFile& file, c10::Device device,
                               TrainingRun& run) {
  run.rank_entries.clear();
  for (const auto& [name, text] : file.texts) {
    absl::string_view entry = name;
    if (!absl::ConsumePrefix(&entry, kEntry)) continue;
    run.rank_entries[std::string(entry)] = text;
  }
  if (!run.random_state) return absl::OkStatus();
  return TorchToStatus("setting the random generators", [&] {
    for (auto& [name, generator] : Generators(device)) {
      const auto state = file.tensors.find(absl::StrCat(kRandom, name));
      if (state == file.tensors.end()) continue;
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state->second);
    }
  });
}

SmallFile TakeWholeValues(const ModelValues& model) {
  const NormalMode normal;
  const c10::NoGradGuard no_grad;
  SmallFile file;
  for (const TensorRange& other : model.others()) {
    if (other.values.layout() != c10::kStrided) continue;
    at::Tensor copy = at::empty(other.sizes, other.file_dtype());
    copy.copy_(other.values);
    file.tensors[other.name] = copy;
  }
  return file;
}

}  // namespace fsdp::checkpoint
