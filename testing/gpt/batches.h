// The text of a run, from files, and the rows that a training step is fed with.
#ifndef TESTING_GPT_BATCHES_H_
#define TESTING_GPT_BATCHES_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gpt {

// Text in memory, split into a part to train on and a part to validate with.
struct TextCorpus {
  std::string train;
  std::string validation;
  int num_files = 0;
  unsigned char largest_byte = 0;
};

// Reads a file, or all text files below a directory in the order of their
// paths, without hidden ones, files with a zero byte in them and links to
// directories. Every 20th block of up to 64 KiB of the text is held out for
// validation. Errors name the path: an error of the system if something cannot
// be read, InvalidArgument for a directory without text, for more than 1 GiB,
// and if a part would be shorter than `min_bytes`.
absl::StatusOr<TextCorpus> ReadTextCorpus(const std::string& path,
                                          size_t min_bytes);

// Splits `text` as ReadTextCorpus() does; either part may be empty.
TextCorpus SplitText(absl::string_view text);

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

// Returns the windows of `text` that begin at `starts`, each of seq + 1 bytes.
Batch WindowsAt(absl::string_view text, absl::Span<const int64_t> starts,
                int64_t seq);

// Windows at random places of a text, which must outlive it.
class RandomWindows final : public BatchSource {
 public:
  // `text` has more than shape.seq bytes.
  RandomWindows(absl::string_view text, BatchShape shape, uint64_t seed);
  Batch Next() override;

 private:
  const absl::string_view text_;
  const BatchShape shape_;
  at::Generator generator_;
};

// Returns `rank`'s batches of `num_windows` windows that are spread evenly over
// `text`; the ranks together have each once. Ranks have equal numbers of
// batches: if num_windows is not a multiple of world_size * shape.batch, the
// last windows are left out.
std::vector<Batch> EvenWindows(absl::string_view text, BatchShape shape,
                               int64_t num_windows, int rank, int world_size);

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
