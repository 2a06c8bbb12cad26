#include "checkpoint/format/tensor_info.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

struct Entry {
  absl::string_view name;
  int bits;
};

// By Dtype.
constexpr std::array<Entry, kNumDtypes> kEntries = {{
    {"BOOL", 8},    {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6},
    {"U8", 8},      {"I8", 8},          {"F8_E5M2", 8},     {"F8_E4M3", 8},
    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},        {"BF16", 16},       {"I32", 32},
    {"U32", 32},    {"F32", 32},        {"C64", 64},        {"F64", 64},
    {"I64", 64},    {"U64", 64},
}};

const Entry& EntryOf(Dtype dtype) {
  return kEntries[static_cast<size_t>(dtype)];
}

}  // namespace

absl::string_view NameOf(Dtype dtype) { return EntryOf(dtype).name; }

std::optional<Dtype> DtypeNamed(absl::string_view name) {
  for (int i = 0; i < kNumDtypes; ++i) {
    if (kEntries[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

int BitsOf(Dtype dtype) { return EntryOf(dtype).bits; }

int64_t ItemBytes(Dtype dtype) {
  const int bits = BitsOf(dtype);
  return bits % 8 == 0 ? bits / 8 : 0;
}

absl::StatusOr<int64_t> NumelOf(const TensorInfo& tensor) {
  bool empty = false;
  for (const int64_t size : tensor.shape) {
    if (size < 0) return Refuse(tensor, "a negative size");
    empty |= size == 0;
  }
  if (empty) return 0;
  int64_t numel = 1;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(numel, size, &numel)) {
      return Refuse(tensor, "its elements are more than 64 bits count");
    }
  }
  return numel;
}

absl::StatusOr<int64_t> BytesOf(const TensorInfo& tensor) {
  FSDP_ASSIGN_OR_RETURN(int64_t bits, NumelOf(tensor));
  if (__builtin_mul_overflow(bits, int64_t{BitsOf(tensor.dtype)}, &bits)) {
    return Refuse(tensor, "its bits are more than 64 bits count");
  }
  if (bits % 8 != 0) return Refuse(tensor, "does not come to whole bytes");
  return bits / 8;
}

absl::Status Refuse(const TensorInfo& tensor, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor \"", tensor.name, "\", ", ToString(tensor), ": ", why));
}

std::string ToString(const TensorInfo& tensor) {
  return absl::StrCat(NameOf(tensor.dtype), "[",
                      absl::StrJoin(tensor.shape, ", "), "]");
}

namespace {

constexpr int64_t kMaxCorners = int64_t{1} << 24;

int64_t Product(absl::Span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

// A point where the number of boxes that one is in changes.
struct Corner {
  absl::uint128 at;  // row-major in the cut dimensions, each one longer
  int32_t change;
};

// The dimensions in which some box is not as long as the tensor.
std::vector<size_t> CutDimensions(absl::Span<const int64_t> shape,
                                  absl::Span<const Box> boxes) {
  std::vector<size_t> cut;
  for (size_t i = 0; i < shape.size(); ++i) {
    const bool is_cut = std::any_of(
        boxes.begin(), boxes.end(),
        [i, &shape](const Box& box) { return box.sizes[i] != shape[i]; });
    if (is_cut) cut.push_back(i);
  }
  return cut;
}

// Of the sum of boxes that are 1 inside and 0 outside: it is what the sums of
// the changes at all corners up to a point are.
void AddCorners(absl::Span<const int64_t> shape, absl::Span<const size_t> cut,
                absl::Span<const int64_t> offsets,
                absl::Span<const int64_t> sizes, int32_t sign,
                std::vector<Corner>& corners) {
  for (size_t corner = 0; corner < size_t{1} << cut.size(); ++corner) {
    absl::uint128 at = 0;
    int32_t change = sign;
    for (size_t k = 0; k < cut.size(); ++k) {
      const size_t i = cut[k];
      const bool is_end = (corner >> k & 1) != 0;
      at = at * absl::uint128(shape[i] + 1) +
           absl::uint128(offsets[i] + (is_end ? sizes[i] : 0));
      if (is_end) change = -change;
    }
    corners.push_back({at, change});
  }
}

std::string PointName(absl::Span<const int64_t> shape,
                      absl::Span<const size_t> cut, absl::uint128 at) {
  std::vector<int64_t> point(shape.size(), 0);
  for (size_t k = cut.size(); k-- > 0;) {
    const absl::uint128 length(shape[cut[k]] + 1);
    point[cut[k]] = static_cast<int64_t>(at % length);
    at /= length;
  }
  return absl::StrCat("[", absl::StrJoin(point, ", "), "]");
}

// All changes must cancel out. The first that does not, in the order of
// elements, says how many boxes too many that element is in.
absl::Status CheckNoChange(absl::Span<const int64_t> shape,
                           absl::Span<const size_t> cut,
                           std::vector<Corner> corners) {
  std::sort(corners.begin(), corners.end(),
            [](const Corner& a, const Corner& b) { return a.at < b.at; });
  for (size_t i = 0; i < corners.size();) {
    const absl::uint128 at = corners[i].at;
    int64_t change = 0;
    for (; i < corners.size() && corners[i].at == at; ++i) {
      change += corners[i].change;
    }
    if (change == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "element ", PointName(shape, cut, at), " is in ",
        change < 0 ? "none" : absl::StrCat(change + 1), " of its pieces"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t Box::Numel() const {
  // An empty one may be longer than 64 bits count in other dimensions.
  return absl::c_linear_search(sizes, 0) ? 0 : Product(sizes);
}

std::vector<Box> RangeToBoxes(absl::Span<const int64_t> shape, int64_t begin,
                              int64_t end) {
  FSDP_CHECK(0 <= begin && begin <= end);
  std::vector<Box> boxes;
  if (shape.empty() && begin < end) boxes.emplace_back();
  while (begin < end && !shape.empty()) {
    Box& box = boxes.emplace_back();
    box.offsets.resize(shape.size());
    box.sizes.assign(shape.begin(), shape.end());
    int64_t rest = begin;
    for (size_t i = shape.size(); i-- > 0; rest /= shape[i]) {
      box.offsets[i] = rest % shape[i];
    }
    // As many rows as there are of the outermost dimension of which the range
    // goes on with a whole one.
    size_t dim = shape.size() - 1;
    int64_t row = 1;  // its elements
    while (dim > 0 && box.offsets[dim] == 0 &&
           row * shape[dim] <= end - begin) {
      row *= shape[dim--];
    }
    std::fill_n(box.sizes.begin(), dim, 1);
    box.sizes[dim] =
        std::min((end - begin) / row, shape[dim] - box.offsets[dim]);
    begin += box.sizes[dim] * row;
  }
  return boxes;
}

absl::Status CheckInBounds(absl::Span<const int64_t> shape, const Box& box) {
  bool inside =
      box.offsets.size() == shape.size() && box.sizes.size() == shape.size();
  for (size_t i = 0; inside && i < shape.size(); ++i) {
    inside = box.offsets[i] >= 0 && box.sizes[i] >= 0 &&
             box.offsets[i] <= shape[i] &&
             box.sizes[i] <= shape[i] - box.offsets[i];
  }
  if (inside) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a piece of [", absl::StrJoin(box.sizes, ", "), "] at [",
      absl::StrJoin(box.offsets, ", "), "] does not lie inside the tensor"));
}

absl::Status CheckTiles(absl::Span<const int64_t> shape,
                        absl::Span<const Box> boxes) {
  if (absl::c_linear_search(shape, 0)) return absl::OkStatus();
  const std::vector<size_t> cut = CutDimensions(shape, boxes);
  const auto count = static_cast<int64_t>(boxes.size());
  if (cut.size() > 24 || count + 1 > kMaxCorners >> cut.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(count, " pieces cut in ", cut.size(),
                     " dimensions are more than can be checked"));
  }
  std::vector<Corner> corners;
  corners.reserve((boxes.size() + 1) << cut.size());
  AddCorners(shape, cut, std::vector<int64_t>(shape.size(), 0), shape, -1,
             corners);
  for (const Box& box : boxes) {
    if (absl::c_linear_search(box.sizes, 0)) continue;
    AddCorners(shape, cut, box.offsets, box.sizes, 1, corners);
  }
  return CheckNoChange(shape, cut, std::move(corners));
}

}  // namespace fsdp::checkpoint
