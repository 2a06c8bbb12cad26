// Synthetic data: rows that count upwards from a random token. The stream is
// that of benchmarks/peers/peer_gpt.py, number for number.
#ifndef TESTING_GPT_DATA_COUNT_DATA_H_
#define TESTING_GPT_DATA_COUNT_DATA_H_

#include <ATen/core/Generator.h>

#include <cstdint>

#include "testing/gpt/data/batch.h"

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

#endif  // TESTING_GPT_DATA_COUNT_DATA_H_
