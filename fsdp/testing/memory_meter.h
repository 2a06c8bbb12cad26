// Measures what LibTorch allocates.
#ifndef FSDP_TESTING_MEMORY_METER_H_
#define FSDP_TESTING_MEMORY_METER_H_

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace fsdp::testing {

// Counts the bytes that this thread allocates on the CPU while a
// c10::DebugInfoGuard has it as its PROFILER_STATE.
class MemoryMeter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t,
                         c10::Device) override {
    if (bytes > 0) allocated_ += bytes;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t allocated() const { return allocated_; }  // freed or not
  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  // Returns the peak since the last call.
  int64_t TakePeak() { return std::exchange(peak_, live_); }

 private:
  int64_t allocated_ = 0;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_MEMORY_METER_H_
