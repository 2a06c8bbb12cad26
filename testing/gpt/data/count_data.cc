#include "testing/gpt/data/count_data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>

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

}  // namespace gpt
