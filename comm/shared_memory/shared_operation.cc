#include "comm/shared_memory/shared_operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "base/check.h"
#include "base/parallel_for.h"
#include "comm/reduction/reduction.h"

namespace fsdp::comm {
namespace {

// Up to this many bytes one thread does all.
constexpr int64_t kGrainBytes = 256 << 10;
// Up to this many bytes every rank reduces all, with one wait instead of two.
constexpr int64_t kSmallAllReduce = 32 << 10;
constexpr int64_t kAlignment = 64;
// Sums of so many bytes leave a core's caches before the optimizer reads them.
constexpr int64_t kTooMuchForCaches = 1 << 20;

using Pointers = absl::InlinedVector<const void*, 16>;

char* Data(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

void Copy(char* to, const char* from, int64_t bytes) {
  if (to == from || bytes == 0) return;
  ParallelFor(bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, end - begin);
  });
}

Pointers Advanced(const Pointers& pointers, int64_t bytes) {
  Pointers advanced;
  for (const void* pointer : pointers) {
    advanced.push_back(static_cast<const char*>(pointer) + bytes);
  }
  return advanced;
}

void ReduceInParallel(at::ScalarType dtype, ReduceOp op, const Pointers& inputs,
                      int64_t count, char* out) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  ParallelFor(count, kGrainBytes / size, [&](int64_t begin, int64_t end) {
    Reduce(dtype, op, Advanced(inputs, begin * size), end - begin,
           out + begin * size);
  });
}

int64_t PartBytes(const CollectiveArgs& buffers, int world_size) {
  switch (buffers.collective) {
    case Collective::kReduceScatter:
      return buffers.out.numel() *
             static_cast<int64_t>(buffers.in.element_size());
    case Collective::kAllGather:
    case Collective::kSplit:
      return static_cast<int64_t>(buffers.in.nbytes());
    case Collective::kAllToAll:
      return static_cast<int64_t>(buffers.in.nbytes()) / world_size;
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      break;
  }
  return static_cast<int64_t>(buffers.out.nbytes());
}

// Returns how many bytes of a part fit into a slot, together with what other
// ranks need of the same chunk, or with the result.
int64_t ChunkBytes(Collective collective, int world_size, int64_t slot_bytes) {
  switch (collective) {
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return slot_bytes / world_size / kAlignment * kAlignment;
    case Collective::kAllReduce:
      return slot_bytes / 2;
    case Collective::kAllGather:
    case Collective::kSplit:
    case Collective::kBroadcast:
      break;
  }
  return slot_bytes;
}

}  // namespace

SharedOperation::SharedOperation(CollectiveArgs buffers, int rank,
                                 int world_size, int64_t slot_bytes)
    : buffers_(std::move(buffers)),
      rank_(rank),
      world_size_(world_size),
      element_size_(static_cast<int64_t>(input().element_size())),
      part_bytes_(PartBytes(buffers_, world_size)),
      chunk_bytes_(ChunkBytes(buffers_.collective, world_size, slot_bytes)),
      num_chunks_(std::max<int64_t>(
          1, (part_bytes_ + chunk_bytes_ - 1) / chunk_bytes_)) {
  FSDP_CHECK(chunk_bytes_ > 0);
}

bool SharedOperation::reduces_by_parts() const {
  return buffers_.collective == Collective::kAllReduce && world_size_ > 1 &&
         part_bytes_ > kSmallAllReduce;
}

SharedOperation::Range SharedOperation::RangeOf(int64_t begin_chunk,
                                                int64_t end_chunk) const {
  const int64_t begin = begin_chunk * chunk_bytes_;
  return {begin, std::min(end_chunk * chunk_bytes_, part_bytes_) - begin};
}

SharedOperation::Range SharedOperation::PartOf(const Range& chunk,
                                               int rank) const {
  const int64_t blocks = (chunk.bytes + kAlignment - 1) / kAlignment;
  const auto edge = [&](int r) {
    return std::min(chunk.bytes, blocks * r / world_size_ * kAlignment);
  };
  return {edge(rank), edge(rank + 1) - edge(rank)};
}

void SharedOperation::Stage(int64_t chunk, char* slot) const {
  const Range range = RangeOf(chunk, chunk + 1);
  const char* from = Data(input()) + range.begin;
  if (!is_divided()) {
    Copy(slot, from, range.bytes);
    return;
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    Copy(slot + peer * chunk_bytes_, from + peer * part_bytes_, range.bytes);
  }
}

void SharedOperation::Take(int64_t begin, int64_t end,
                           absl::Span<const SharedSource> sources) const {
  const Range range = RangeOf(begin, end);
  switch (buffers_.collective) {
    case Collective::kAllGather:
    case Collective::kSplit:
    case Collective::kAllToAll:
      return TakeFromAll(range, sources);
    case Collective::kReduceScatter:
    case Collective::kAllReduce:
      return TakeReduced(range, sources);
    case Collective::kBroadcast:
      if (rank_ == buffers_.root) return;
      return Copy(Data(buffers_.out) + range.begin, sources[buffers_.root].data,
                  range.bytes);
  }
}

void SharedOperation::TakeFromAll(
    const Range& range, absl::Span<const SharedSource> sources) const {
  for (int peer = 0; peer < world_size_; ++peer) {
    Copy(Data(buffers_.out) + peer * part_bytes_ + range.begin,
         ForThisRank(sources[peer], range), range.bytes);
  }
}

const char* SharedOperation::ForThisRank(const SharedSource& source,
                                         const Range& range) const {
  const int place = is_divided() ? rank_ : 0;
  return source.staged ? source.data + place * chunk_bytes_
                       : source.data + place * part_bytes_ + range.begin;
}

void SharedOperation::TakeReduced(
    const Range& range, absl::Span<const SharedSource> sources) const {
  Pointers inputs;
  for (const SharedSource& source : sources) {
    inputs.push_back(ForThisRank(source, range));
  }
  const int64_t begin = range.begin / element_size_;
  const int64_t count = range.bytes / element_size_;
  const at::ScalarType dtype = input().scalar_type();
  if (!buffers_.scaled) {
    ReduceInParallel(dtype, buffers_.op, inputs, count,
                     Data(buffers_.out) + range.begin);
    return;
  }
  const auto out_size = static_cast<int64_t>(buffers_.out.element_size());
  char* out = Data(buffers_.out) + begin * out_size;
  const Stores stores = buffers_.out.numel() * out_size >= kTooMuchForCaches
                            ? Stores::kPastCaches
                            : Stores::kCached;
  ParallelFor(
      count, kGrainBytes / element_size_, [&](int64_t first, int64_t last) {
        SumScaled(dtype, Advanced(inputs, first * element_size_), last - first,
                  buffers_.scaled->scale, buffers_.scaled->accumulate,
                  buffers_.out.scalar_type(), stores, out + first * out_size);
      });
}

void SharedOperation::ReducePart(int64_t chunk,
                                 absl::Span<const SharedSource> sources,
                                 char* own_slot) const {
  const Range range = RangeOf(chunk, chunk + 1);
  const Range part = PartOf(range, rank_);
  Pointers inputs;
  for (const SharedSource& source : sources) {
    const int64_t begin = source.staged ? 0 : range.begin;
    inputs.push_back(source.data + begin + part.begin);
  }
  ReduceInParallel(input().scalar_type(), buffers_.op, inputs,
                   part.bytes / element_size_,
                   own_slot + chunk_bytes_ + part.begin);
}

void SharedOperation::TakeParts(int64_t chunk,
                                absl::Span<const SharedSource> slots) const {
  const Range range = RangeOf(chunk, chunk + 1);
  for (int peer = 0; peer < world_size_; ++peer) {
    const Range part = PartOf(range, peer);
    Copy(Data(buffers_.out) + range.begin + part.begin,
         slots[peer].data + chunk_bytes_ + part.begin, part.bytes);
  }
}

}  // namespace fsdp::comm
