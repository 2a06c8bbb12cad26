#include "testing/gpt/batches.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <vector>

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

Batch WindowsAt(absl::string_view text, absl::Span<const int64_t> starts,
                int64_t seq) {
  const auto batch = static_cast<int64_t>(starts.size());
  const at::Tensor windows = at::empty({batch, seq + 1}, at::kLong);
  int64_t* out = windows.mutable_data_ptr<int64_t>();
  for (int64_t start : starts) {
    for (char byte : text.substr(start, seq + 1)) {
      *out++ = static_cast<unsigned char>(byte);
    }
  }
  return {windows.slice(/*dim=*/1, 0, seq), windows.slice(1, 1)};
}

RandomWindows::RandomWindows(absl::string_view text, BatchShape shape,
                             uint64_t seed)
    : text_(text),
      shape_(shape),
      generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

Batch RandomWindows::Next() {
  const int64_t num_starts = static_cast<int64_t>(text_.size()) - shape_.seq;
  const at::Tensor starts =
      at::randint(num_starts, {shape_.batch}, generator_, at::kLong);
  return WindowsAt(
      text_,
      absl::MakeConstSpan(starts.const_data_ptr<int64_t>(), starts.numel()),
      shape_.seq);
}

std::vector<Batch> EvenWindows(absl::string_view text, BatchShape shape,
                               int64_t num_windows, int rank, int world_size) {
  const int64_t num_starts = static_cast<int64_t>(text.size()) - shape.seq;
  const int64_t num_batches = num_windows / (world_size * shape.batch);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < num_batches; ++i) {
    std::vector<int64_t> starts;
    for (int64_t row = 0; row < shape.batch; ++row) {
      const int64_t window = (i * shape.batch + row) * world_size + rank;
      starts.push_back(num_starts * window / num_windows);
    }
    batches.push_back(WindowsAt(text, starts, shape.seq));
  }
  return batches;
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
