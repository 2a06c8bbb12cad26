#include "tools/checkpoint/tensor_stream.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "checkpoint/tensor/dtype.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint::tool {
namespace {

// Of a tensor that is cut in columns: so many bytes are at most so many runs.
constexpr int64_t kWindowBytes = int64_t{4} << 20;

// Joins elements that the reader has cut.
class WholeElements {
 public:
  WholeElements(int64_t item, TakeBytes take)
      : item_(static_cast<size_t>(item)), take_(take) {}

  absl::Status Add(absl::Span<const char> bytes) {
    if (!cut_.empty()) {
      const size_t more = std::min(item_ - cut_.size(), bytes.size());
      cut_.append(bytes.data(), more);
      bytes.remove_prefix(more);
      if (cut_.size() < item_) return absl::OkStatus();
      FSDP_RETURN_IF_ERROR(take_(cut_));
      cut_.clear();
    }
    const size_t whole = bytes.size() / item_ * item_;
    cut_.assign(bytes.data() + whole, bytes.size() - whole);
    return whole > 0 ? take_(bytes.first(whole)) : absl::OkStatus();
  }

 private:
  const size_t item_;
  TakeBytes take_;
  std::string cut_;
};

// Do the elements of the box lie back to back in the tensor?
bool IsOneRun(absl::Span<const int64_t> shape, const Box& box) {
  size_t d = 0;
  while (d < shape.size() && box.sizes[d] == 1) ++d;
  for (++d; d < shape.size(); ++d) {
    if (box.sizes[d] != shape[d]) return false;
  }
  return true;
}

int64_t WindowOf(const StoredTensor& tensor) {
  const bool few_runs = std::all_of(
      tensor.boxes.begin(), tensor.boxes.end(),
      [&](const StoredBox& box) { return IsOneRun(tensor.info.shape, box); });
  return few_runs ? INT64_MAX : kWindowBytes / ItemBytes(tensor.info.dtype);
}

absl::Status ReadRuns(RangeReader& reader, const std::vector<FileRun>& runs,
                      WholeElements& elements) {
  std::vector<ReadRange> ranges;
  ranges.reserve(runs.size());
  for (const FileRun& run : runs) {
    ranges.push_back({run.file, run.offset, run.bytes});
  }
  return reader.Read(ranges,
                     [&](size_t, int64_t, absl::Span<const char> bytes) {
                       return elements.Add(bytes);
                     });
}

absl::Status StreamPacked(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
  std::vector<FileRun> runs;
  runs.reserve(tensor.boxes.size());
  for (const StoredBox& box : tensor.boxes) {
    runs.push_back({box.file, box.offset, bytes, 0});
  }
  WholeElements elements(1, take);
  return ReadRuns(reader, runs, elements);
}

}  // namespace

absl::Status StreamElements(RangeReader& reader, const StoredTensor& tensor,
                            int64_t begin, int64_t end, TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  const int64_t item = ItemBytes(tensor.info.dtype);
  if (item == 0 && begin == 0 && end == numel) {
    return StreamPacked(reader, tensor, take);
  }
  // Says what is wrong with the arguments.
  if (item == 0) return RunsOf(tensor, begin, end).status();
  WholeElements elements(item, take);
  const int64_t window = WindowOf(tensor);
  while (begin < end) {
    const int64_t count = std::min(window, end - begin);
    FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                          RunsOf(tensor, begin, begin + count));
    FSDP_RETURN_IF_ERROR(ReadRuns(reader, runs, elements));
    begin += count;
  }
  return absl::OkStatus();
}

absl::Status StreamTensor(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  return StreamElements(reader, tensor, 0, numel, take);
}

}  // namespace fsdp::checkpoint::tool
