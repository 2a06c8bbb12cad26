// Batches on the device of the model.
#ifndef TESTING_GPT_DATA_DEVICE_BATCHES_H_
#define TESTING_GPT_DATA_DEVICE_BATCHES_H_

#include <c10/core/Device.h>

#include <memory>
#include <utility>

#include "testing/gpt/data/batch.h"

namespace gpt {

// Copies a batch by way of page-locked memory, so that the host does not wait.
// On the CPU it returns `batch`.
Batch ToDevice(const Batch& batch, c10::Device device);

class DeviceBatches final : public BatchSource {
 public:
  DeviceBatches(std::unique_ptr<BatchSource> base, c10::Device device)
      : base_(std::move(base)), device_(device) {}

  Batch Next() override { return ToDevice(base_->Next(), device_); }

 private:
  const std::unique_ptr<BatchSource> base_;
  const c10::Device device_;
};

}  // namespace gpt

#endif  // TESTING_GPT_DATA_DEVICE_BATCHES_H_
