#include "device_ops/packed_range.h"

namespace fsdp::device_ops {
namespace {

void AddConstants(c10::IntArrayRef ranges, double value,
                  std::vector<PackedRange>* packed) {
  for (size_t i = 0; i < ranges.size(); i += 2) {
    const int64_t numel = ranges[i + 1] - ranges[i];
    if (numel == 0) continue;
    packed->push_back({nullptr, at::kFloat, ranges[i], numel, value});
  }
}

}  // namespace

std::vector<PackedRange> PackedRanges(at::TensorList sources,
                                      c10::IntArrayRef pieces,
                                      c10::IntArrayRef zeros,
                                      c10::IntArrayRef ones) {
  std::vector<PackedRange> packed;
  packed.reserve(pieces.size() / kNumbersOfPiece +
                 (zeros.size() + ones.size()) / 2);
  for (size_t i = 0; i < pieces.size(); i += kNumbersOfPiece) {
    if (pieces[i + 3] == 0) continue;
    const at::Tensor& source = sources[pieces[i]];
    const auto offset =
        pieces[i + 1] * static_cast<int64_t>(source.element_size());
    packed.push_back(
        {static_cast<const char*>(source.const_data_ptr()) + offset,
         source.scalar_type(), pieces[i + 2], pieces[i + 3], 0});
  }
  AddConstants(zeros, 0, &packed);
  AddConstants(ones, 1, &packed);
  return packed;
}

}  // namespace fsdp::device_ops
