// Batches of replicas that come and go.
#ifndef TESTING_GPT_DATA_PART_BATCHES_H_
#define TESTING_GPT_DATA_PART_BATCHES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "testing/gpt/data/batch.h"

namespace gpt {

// Before each batch it is told which part of which step is wanted. Part i of
// all steps is one stream, so that a batch belongs to one part of one step,
// however many replicas take part: none is trained twice.
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

}  // namespace gpt

#endif  // TESTING_GPT_DATA_PART_BATCHES_H_
