// The rows that a training step is fed with.
#ifndef TESTING_GPT_DATA_BATCH_H_
#define TESTING_GPT_DATA_BATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gpt {

// Tokens as int64 [batch, seq], and the token that follows each.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
};

struct BatchShape {
  int64_t batch;
  int64_t seq;
};

// An endless stream of batches, different on every rank, the same in every run.
// Thread-compatible.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual Batch Next() = 0;
};

// Seed of rank 0's stream; rank r adds r.
inline constexpr uint64_t kDataSeed = 1234;

}  // namespace gpt

#endif  // TESTING_GPT_DATA_BATCH_H_
