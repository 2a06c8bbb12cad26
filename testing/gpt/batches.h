// The rows that a training step is fed with.
#ifndef TESTING_GPT_BATCHES_H_
#define TESTING_GPT_BATCHES_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

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

// Synthetic data: rows that count upwards from a random token. The stream is
// that of benchmarks/peers/peer_gpt.py, number for number.
class CountData final : public BatchSource {
 public:
  CountData(int64_t vocab, BatchShape shape, int rank);
  Batch Next() override;

 private:
  const int64_t vocab_;
  const BatchShape shape_;
  at::Generator generator_;
};

// Batches of replicas that come and go: before each it is told which part of
// which step is wanted. Part i of all steps is one stream, so that a batch
// belongs to one part of one step, however many replicas take part: none is
// trained twice.
class PartBatches final : public BatchSource {
 public:
  // `make` begins the stream of a part.
  explicit PartBatches(
      std::function<std::unique_ptr<BatchSource>(int part)> make)
      : make_(std::move(make)) {}

  // `step`, from 0, is later than all before it.
  void Select(int64_t step, int part) {
    step_ = step;
    part_ = part;
  }
  // Is called once after each Select().
  Batch Next() override;

 private:
  struct Stream {
    std::unique_ptr<BatchSource> source;
    int64_t next = 0;  // step
  };

  const std::function<std::unique_ptr<BatchSource>(int part)> make_;
  std::map<int, Stream> streams_;  // by part
  int64_t step_ = 0;
  int part_ = 0;
};

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

#endif  // TESTING_GPT_BATCHES_H_
