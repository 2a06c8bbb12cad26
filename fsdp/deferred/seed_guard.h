// Random numbers of one's own for a while.
#ifndef FSDP_DEFERRED_SEED_GUARD_H_
#define FSDP_DEFERRED_SEED_GUARD_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace fsdp {

// Seeds the default generators of all devices for as long as it lives. One
// thread at a time may have one, others wait: ranks may be threads.
class SeedGuard {
 public:
  explicit SeedGuard(uint64_t seed);
  SeedGuard(const SeedGuard&) = delete;
  SeedGuard& operator=(const SeedGuard&) = delete;
  ~SeedGuard();

 private:
  void Seed(at::Generator generator, uint64_t seed);

  const std::lock_guard<std::recursive_mutex> only_;
  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
};

}  // namespace fsdp

#endif  // FSDP_DEFERRED_SEED_GUARD_H_
