#include "fsdp/deferred/seed_guard.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>

namespace fsdp {
namespace {

std::recursive_mutex& DefaultGenerators() {
  static std::recursive_mutex mutex;
  return mutex;
}

}  // namespace

SeedGuard::SeedGuard(uint64_t seed) : only_(DefaultGenerators()) {
  Seed(at::globalContext().defaultGenerator(c10::kCPU), seed);
  if (!at::hasCUDA()) return;
  const auto devices = static_cast<c10::DeviceIndex>(at::getNumGPUs());
  for (c10::DeviceIndex i = 0; i < devices; ++i) {
    Seed(at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, i)),
         seed);
  }
}

SeedGuard::~SeedGuard() {
  for (auto& [generator, state] : saved_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

void SeedGuard::Seed(at::Generator generator, uint64_t seed) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  saved_.emplace_back(generator, generator.get_state());
  generator.set_current_seed(seed);
}

}  // namespace fsdp
