// The rows that a training step is fed with.
#ifndef TESTING_GPT_BATCHES_H_
#define TESTING_GPT_BATCHES_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <map>

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

// The rank for which there are batches, of so many.
struct Place {
  int rank = 0;
  int ranks = 1;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
};

// Seed of rank 0's stream; rank r adds r.
inline constexpr uint64_t kDataSeed = 1234;

// Synthetic data: rows that count upwards from a random token, different on
// every rank, the same in every run. The stream of a rank is that of
// benchmarks/peers/peer_gpt.py, number for number.
//
// Replicas come and go: each takes up a part of a step. Part p of all steps has
// the streams that ranks p * ranks and later have without replicas, so that a
// batch belongs to one part of one step, however many replicas take part: none
// is trained twice. Thread-compatible.
class Batches {
 public:
  Batches(int64_t vocab, BatchShape shape, const Place& place)
      : vocab_(vocab), shape_(shape), place_(place) {}

  // Returns the batch of a part of `step`, from 0, which is later than all
  // before it, on the device, for which the host does not wait.
  Batch Of(int64_t step, int part = 0);

 private:
  struct Stream {
    at::Generator generator;
    int64_t next = 0;  // step
  };

  const int64_t vocab_;
  const BatchShape shape_;
  const Place place_;
  std::map<int, Stream> streams_;  // by part
};

}  // namespace gpt

#endif  // TESTING_GPT_BATCHES_H_
