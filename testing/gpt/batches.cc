#include "testing/gpt/batches.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>

#include "base/device_streams.h"

namespace gpt {

Batch Batches::Of(int64_t step, int part) {
  Stream& stream = streams_[part];
  if (!stream.generator.defined()) {
    stream.generator = at::make_generator<at::CPUGeneratorImpl>(
        kDataSeed + part * place_.ranks + place_.rank);
  }
  at::Tensor first;
  // The peer draws whole rows and keeps their first tokens.
  for (; stream.next <= step; ++stream.next) {
    first = at::randint(vocab_, {shape_.batch, shape_.seq + 1},
                        stream.generator, at::kLong)
                .slice(/*dim=*/1, 0, 1);
  }
  const at::Tensor rows =
      first.add(at::arange(shape_.seq + 1, at::kLong)).remainder(vocab_);
  return {fsdp::CopyToDevice(rows.slice(1, 0, shape_.seq), place_.device),
          fsdp::CopyToDevice(rows.slice(1, 1), place_.device)};
}

}  // namespace gpt
