// Synthetic data: rows that count upwards from a random token. The stream is
// that of benchmarks/peers/peer_gpt.py, number for number.
#ifndef EXAMPLES_GPT_DATA_COUNT_DATA_H_
#define EXAMPLES_GPT_DATA_COUNT_DATA_H_

#include <ATen/core/Generator.h>

#include <cstdint>

#include "examples/gpt/data/batch.h"

namespace gpt {

class CountData final : public BatchSource {
 public:
  CountData(int64_t vocab, BatchShape shape, int rank);

  Batch Next() override;

 private:
  const int64_t vocab_;
  const BatchShape shape_;
  at::Generator generator_;
};

}  // namespace gpt

#endif  // EXAMPLES_GPT_DATA_COUNT_DATA_H_
