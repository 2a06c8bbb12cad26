#include "examples/gpt/checkpoint.h"

#include <c10/core/GradMode.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/agreement.h"

namespace gpt {

std::vector<TensorSpec> ParameterSpecs(const GptImpl& model) {
  std::vector<TensorSpec> specs;
  for (const auto& parameter : model.named_parameters()) {
    specs.push_back({parameter.key(), parameter.value().sizes().vec(),
                     parameter.value().scalar_type()});
  }
  return specs;
}

absl::Status LoadParameters(const std::string& path, GptImpl& model) {
  const c10::NoGradGuard no_grad;
  FSDP_ASSIGN_OR_RETURN(SafetensorsReader reader,
                        SafetensorsReader::Open(path));
  std::vector<std::string> names;
  for (const auto& parameter : model.named_parameters()) {
    FSDP_RETURN_IF_ERROR(reader.Read(parameter.key(), parameter.value()));
    names.push_back(parameter.key());
  }
  return reader.ExpectOnly(names);
}

absl::Status SaveParameters(const std::string& path,
                            absl::Span<const TensorSpec> specs,
                            TrainableModel& model,
                            fsdp::comm::Communicator& communicator) {
  std::unique_ptr<SafetensorsWriter> writer;
  absl::Status status = absl::OkStatus();
  if (communicator.rank() == 0) {
    absl::StatusOr<std::unique_ptr<SafetensorsWriter>> created =
        SafetensorsWriter::Create(path, specs);
    status = created.status();
    if (created.ok()) writer = *std::move(created);
  }
  const auto agree = [&communicator](const absl::Status& mine) {
    return fsdp::comm::Agree(communicator, mine, "saving parameters",
                             absl::Now() + communicator.default_timeout());
  };
  FSDP_RETURN_IF_ERROR(agree(status));
  FSDP_RETURN_IF_ERROR(model.ForEachFullParameter(
      [&writer](const std::string& name, const at::Tensor& tensor) {
        return writer == nullptr ? absl::OkStatus()
                                 : writer->Write(name, tensor);
      }));
  return agree(writer == nullptr ? absl::OkStatus() : writer->Finish());
}

}  // namespace gpt
