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

}  // namespace fsdp
