#include "checkpoint/format/tensor_info.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"
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

constexpr int64_t kMaxWork = int64_t{1} << 24;

int64_t Product(absl::Span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1},
                         std::multiplies<>());
}

// Looks for the first element that is not in exactly one of some boxes, none of
// which is empty: cuts the tensor along one dimension where boxes begin and
// end, each slab along the next one, and so on.
class TileSearch {
 public:
  explicit TileSearch(absl::Span<const int64_t> shape)
      : shape_(shape), point_(shape.size(), 0) {}

  const std::vector<int64_t>& point() const { return point_; }
  bool is_too_much() const { return work_ > kMaxWork; }

  // Returns in how many of `boxes` the first such element is, and makes it
  // point(). Returns 1 if there is none. The dimensions before `dim` are those
  // of a slab. If it is too much, the result means nothing.
  size_t Find(std::vector<const Box*> boxes, size_t dim = 0) {
    if (dim == shape_.size()) return boxes.size();
    std::sort(boxes.begin(), boxes.end(), [dim](const Box* a, const Box* b) {
      return a->offsets[dim] < b->offsets[dim];
    });
    const auto end_of = [dim](const Box* box) {
      return box->offsets[dim] + box->sizes[dim];
    };
    std::vector<const Box*> inside;
    auto next = boxes.begin();
    for (int64_t& at = point_[dim] = 0; at < shape_[dim];) {
      for (; next != boxes.end() && (*next)->offsets[dim] == at; ++next) {
        inside.push_back(*next);
      }
      int64_t end = next == boxes.end() ? shape_[dim] : (*next)->offsets[dim];
      for (const Box* box : inside) end = std::min(end, end_of(box));
      work_ += static_cast<int64_t>(inside.size()) + 1;
      if (is_too_much()) return 0;
      const size_t count = Find(inside, dim + 1);
      if (count != 1) return count;
      at = end;
      inside.erase(
          std::remove_if(inside.begin(), inside.end(),
                         [&](const Box* box) { return end_of(box) == at; }),
          inside.end());
    }
    return 1;
  }

 private:
  const absl::Span<const int64_t> shape_;
  std::vector<int64_t> point_;
  int64_t work_ = 0;
};

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
  std::vector<const Box*> some;
  for (const Box& box : boxes) {
    if (!absl::c_linear_search(box.sizes, 0)) some.push_back(&box);
  }
  TileSearch search(shape);
  const size_t count = search.Find(std::move(some));
  if (search.is_too_much()) {
    return absl::InvalidArgumentError(
        absl::StrCat(boxes.size(), " pieces are more than can be checked"));
  }
  if (count == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "element [", absl::StrJoin(search.point(), ", "), "] is in ",
      count == 0 ? "none" : absl::StrCat(count), " of its pieces"));
}

}  // namespace fsdp::checkpoint
