#include "fsdp/options/offload_options.h"

namespace fsdp {

const char* ToString(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kCpu:
      return "cpu";
    case Tier::kSsd:
      return "ssd";
  }
  return "?";
}

const char* ToString(RestingKind kind) {
  switch (kind) {
    case RestingKind::kParameters:
      return "parameters";
    case RestingKind::kGradients:
      return "gradients";
    case RestingKind::kOptimizer:
      return "optimizer";
  }
  return "?";
}

const char* ToString(StepOn step_on) {
  switch (step_on) {
    case StepOn::kDevice:
      return "device";
    case StepOn::kHost:
      return "host";
    case StepOn::kFaster:
      return "the faster";
  }
  return "unknown";
}

Tier OffloadOptions::tier(RestingKind kind) const {
  switch (kind) {
    case RestingKind::kParameters:
      return parameters;
    case RestingKind::kGradients:
      return gradients;
    case RestingKind::kOptimizer:
      return optimizer;
  }
  return Tier::kDevice;
}

// With its parameters, PyTorch moves the gradients that the optimizer on the
// CPU needs, and so the states.
OffloadOptions ToOffloadOptions(const CPUOffload& offload) {
  OffloadOptions options;
  if (!offload.offload_params) return options;
  options.parameters = options.gradients = options.optimizer = Tier::kCpu;
  return options;
}

// Fairscale keeps parameters only on its SSD.
OffloadOptions ToOffloadOptions(const FairscaleOffload& offload) {
  OffloadOptions options;
  if (offload.move_params_to_cpu) options.parameters = Tier::kCpu;
  if (offload.move_grads_to_cpu) options.gradients = Tier::kCpu;
  if (!offload.ssd_filepath_dir.empty()) {
    options.parameters = Tier::kSsd;
    options.directory = offload.ssd_filepath_dir;
  }
  return options;
}

}  // namespace fsdp
