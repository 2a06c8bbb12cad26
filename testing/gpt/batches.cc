#include "testing/gpt/batches.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>

#include "base/device_streams.h"

namespace gpt {

CountData::CountData(int64_t vocab, BatchShape shape, int rank)
    : vocab_(vocab),
      shape_(shape),
      generator_(at::make_generator<at::CPUGeneratorImpl>(kDataSeed + rank)) {}

Batch CountData::Next() {
  // The peer draws whole rows and keeps their first tokens.
  const at::Tensor first =
      at::randint(vocab_, {shape_.batch, shape_.seq + 1}, generator_, at::kLong)
          .slice(/*dim=*/1, 0, 1);
  const at::Tensor rows =
      first.add(at::arange(shape_.seq + 1, at::kLong)).remainder(vocab_);
  return {rows.slice(1, 0, shape_.seq), rows.slice(1, 1)};
}

Batch PartBatches::Next() {
  Stream& stream = streams_[part_];
  if (stream.source == nullptr) stream.source = make_(part_);
  for (; stream.next < step_; ++stream.next) stream.source->Next();
  ++stream.next;
  return stream.source->Next();
}

Batch ToDevice(const Batch& batch, c10::Device device) {
  return {fsdp::CopyToDevice(batch.inputs, device),
          fsdp::CopyToDevice(batch.targets, device)};
}

}  // namespace gpt
