#include "offload/store_parts.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::offload {

absl::Status CheckNewRegion(absl::string_view region, int64_t bytes) {
  if (region.empty() || static_cast<int64_t>(region.size()) > kMaxNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("create a region: its name has ", region.size(),
                     " bytes; take 1 to ", kMaxNameBytes));
  }
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "create region '", region, "': ", bytes, " bytes is no size"));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(absl::string_view what, absl::string_view region,
                        int64_t size, int64_t offset, int64_t length) {
  if (offset >= 0 && offset <= size && length <= size - offset) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(
      absl::StrCat(what, " region '", region, "': ", length,
                   " bytes from offset ", offset, " on, of ", size));
}

absl::Status RegionExists(absl::string_view region) {
  return absl::AlreadyExistsError(
      absl::StrCat("create region '", region, "': there is one of this name"));
}

absl::Status CannotRollBack(absl::string_view store) {
  return absl::UnimplementedError(absl::StrCat(
      "roll back ", store,
      ": it does not keep what is written over; make it with `rollback`"));
}

absl::Status NoSuchRegion(absl::string_view what, absl::string_view region) {
  return absl::NotFoundError(
      absl::StrCat(what, " region '", region,
                   "': there is none of this name; create it first"));
}

Extents::Extents(int64_t capacity) : capacity_(capacity) {
  FSDP_CHECK(capacity >= 0);
  if (capacity > 0) free_[0] = capacity;
}

std::optional<int64_t> Extents::Take(int64_t bytes) {
  FSDP_CHECK(bytes >= 0);
  if (bytes == 0) return 0;
  for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
    const int64_t start = piece->first;
    if (piece->second - start < bytes) continue;
    Cut(piece, start, bytes);
    return start;
  }
  return std::nullopt;
}

absl::StatusOr<int64_t> Extents::TakeFor(absl::string_view region,
                                         int64_t bytes) {
  const std::optional<int64_t> offset = Take(StoredBytes(bytes));
  if (offset.has_value()) return *offset;
  return absl::ResourceExhaustedError(absl::StrCat(
      "create region '", region, "': it needs ", StoredBytes(bytes),
      " bytes; the store has ", capacity_ - used_, " left, ", LargestFree(),
      " of them in one piece; make the store larger or erase regions"));
}

bool Extents::TakeAt(int64_t offset, int64_t bytes) {
  if (bytes == 0) return true;
  auto piece = free_.upper_bound(offset);
  if (piece == free_.begin()) return false;
  --piece;
  if (bytes < 0 || piece->second - offset < bytes) return false;
  Cut(piece, offset, bytes);
  return true;
}

void Extents::Cut(Free::iterator piece, int64_t offset, int64_t bytes) {
  const auto [start, end] = *piece;
  free_.erase(piece);
  if (start < offset) free_[start] = offset;
  if (offset + bytes < end) free_[offset + bytes] = end;
  used_ += bytes;
  peak_used_ = std::max(peak_used_, used_);
}

void Extents::Give(int64_t offset, int64_t bytes) {
  if (bytes == 0) return;
  int64_t start = offset;
  int64_t end = offset + bytes;
  FSDP_CHECK(bytes > 0 && start >= 0 && end <= capacity_);
  auto next = free_.lower_bound(start);
  FSDP_CHECK(next == free_.end() || next->first >= end);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    FSDP_CHECK(before->second <= start);
    if (before->second == start) {
      start = before->first;
      free_.erase(before);
    }
  }
  free_[start] = end;
  used_ -= bytes;
}

int64_t Extents::LargestFree() const {
  int64_t largest = 0;
  for (const auto& [start, end] : free_) {
    largest = std::max(largest, end - start);
  }
  return largest;
}

}  // namespace fsdp::offload
