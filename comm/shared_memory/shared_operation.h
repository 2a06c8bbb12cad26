// Moves the bytes of one rank in a collective over shared memory: stages them
// for the others, chunk by chunk, and takes theirs. Knows nothing of waiting.
#ifndef COMM_SHARED_MEMORY_SHARED_OPERATION_H_
#define COMM_SHARED_MEMORY_SHARED_OPERATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/types/span.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// The input of a rank: all of it, or the staged part of one chunk.
struct SharedSource {
  const char* data = nullptr;
  bool staged = false;
};

class SharedOperation {
 public:
  // A slot has `slot_bytes`, a multiple of 128 for each rank. kSplit gathers
  // `in`, as kAllGather does.
  SharedOperation(CollectiveArgs buffers, int rank, int world_size,
                  int64_t slot_bytes);

  const CollectiveArgs& buffers() const { return buffers_; }
  // Returns what other ranks read: `in`, or `out` if that is both. Only some
  // collectives can read it in place.
  const at::Tensor& input() const {
    return buffers_.in.defined() ? buffers_.in : buffers_.out;
  }
  bool input_may_be_read_in_place() const { return buffers_.in.defined(); }
  bool only_root_has_input() const {
    return buffers_.collective == Collective::kBroadcast;
  }
  // True for a large all-reduce, in which every rank reduces a part for all.
  bool reduces_by_parts() const;

  // At least one, so that all ranks pass a point in every collective.
  int64_t num_chunks() const { return num_chunks_; }

  // Copies the bytes that the others need of `chunk` into a slot.
  void Stage(int64_t chunk, char* slot) const;

  // Takes the bytes that this rank needs of the chunks [begin, end) from
  // `sources`, by rank, its own included. It takes more than one chunk only if
  // nothing is staged.
  void Take(int64_t begin, int64_t end,
            absl::Span<const SharedSource> sources) const;

  // If reduces_by_parts(), the first writes this rank's part of the result into
  // its slot, and the second takes the result from the slots of all.
  void ReducePart(int64_t chunk, absl::Span<const SharedSource> sources,
                  char* own_slot) const;
  void TakeParts(int64_t chunk, absl::Span<const SharedSource> slots) const;

 private:
  // A range of bytes in a rank's part of the data, or in all of it if that is
  // not divided.
  struct Range {
    int64_t begin;
    int64_t bytes;
  };
  // True if the input has a part for each rank.
  bool is_divided() const {
    return buffers_.collective == Collective::kReduceScatter ||
           buffers_.collective == Collective::kAllToAll;
  }
  // Returns the bytes of `source` that this rank needs of a range.
  const char* ForThisRank(const SharedSource& source, const Range& range) const;

  Range RangeOf(int64_t begin_chunk, int64_t end_chunk) const;
  // Returns the part of a chunk of an all-reduce that `rank` reduces.
  Range PartOf(const Range& chunk, int rank) const;

  void TakeFromAll(const Range& range,
                   absl::Span<const SharedSource> sources) const;
  void TakeReduced(const Range& range,
                   absl::Span<const SharedSource> sources) const;

  const CollectiveArgs buffers_;
  const int rank_;
  const int world_size_;
  const int64_t element_size_;
  const int64_t part_bytes_;
  const int64_t chunk_bytes_;
  const int64_t num_chunks_;
};

}  // namespace fsdp::comm

#endif  // COMM_SHARED_MEMORY_SHARED_OPERATION_H_
