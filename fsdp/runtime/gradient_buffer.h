// Lays the gradients of a unit's trained parameters out in a buffer for one
// reduce-scatter, makes its result the gradient of a shard, and manages the
// memory of such buffers.
#ifndef FSDP_RUNTIME_GRADIENT_BUFFER_H_
#define FSDP_RUNTIME_GRADIENT_BUFFER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/memory/buffer_pool.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp {

// Where gradients lie in the buffer, by arithmetic alone. It has one segment
// per rank, all as long as the longest:
//
//   | gradients of what the rank's shard has | one flag per parameter | padding
//
// Both are of trained parameters alone, in the order and alignment of the
// shard, so with all of them trained a segment is laid out as the shard. If one
// rank's shard has all that is trained, the others' segments are as long and
// only padding; at most, segments are as long as a shard and the flags. Numbers
// count elements. Immutable, hence thread-safe.
class GradientLayout {
 public:
  // `trained` has an entry for each parameter of `layout`, which must outlive
  // this object. `element_size` is of the buffer's elements, in bytes.
  GradientLayout(const flat_param::FlatLayout& layout,
                 std::vector<bool> trained, int64_t element_size);

  const std::vector<bool>& trained() const { return trained_; }
  // Indices of trained parameters, ascending.
  const std::vector<int>& parameters() const { return parameters_; }
  int num_flags() const { return static_cast<int>(parameters_.size()); }

  int world_size() const { return layout_.world_size(); }
  // Lengths of a segment: of its gradients, which the flags follow, and of all
  // of it.
  int64_t gradients_numel() const { return gradients_numel_; }
  int64_t segment_numel() const { return segment_numel_; }
  int64_t numel() const { return segment_numel_ * world_size(); }
  int64_t bytes() const { return numel() * element_size_; }
  int64_t segment_bytes() const { return segment_numel_ * element_size_; }

  // Returns the part of trained parameter i that the shard of `rank` has, in
  // the rank's segment; empty if there is none.
  flat_param::Slice InSegment(int i, int rank) const;
  // Returns the ranks whose shards have some of parameter i.
  flat_param::Slice RanksOf(int i) const;
  // The ranges of the buffer before the flags that no parameter covers.
  const std::vector<flat_param::Slice>& gaps() const { return gaps_; }

  // Returns how many elements a segment has from its first flag to its end, if
  // all parameters are trained: with fewer it never has more.
  static int64_t MostFlags(const flat_param::FlatLayout& layout,
                           int64_t element_size);

 private:
  void FindGaps();

  const flat_param::FlatLayout& layout_;
  const std::vector<bool> trained_;
  const int64_t element_size_;
  std::vector<int> parameters_;
  // Trained parameters one after the other: the begin of each, by its index,
  // and of each rank's shard.
  std::vector<int64_t> begins_;
  std::vector<int64_t> shard_begins_;
  int64_t gradients_numel_ = 0;
  int64_t segment_numel_ = 0;
  std::vector<flat_param::Slice> gaps_;
};

// Makes a mean of gradients: they are multiplied by `before` the reduction and
// by `after` it.
struct GradientScaling {
  double before = 1;
  double after = 1;
  // `before` is set only because the communicator's sum is faster so; other
  // sums get the gradients as they are.
  bool before_for_speed = false;
};

// Returns the scaling for a mean over `ranks`, all of it after the sum. In
// fp16, where a sum may overflow and a small gradient vanish, about half of it
// (in powers of two) comes before. These are fairscale's and PyTorch FSDP's
// factors.
GradientScaling MeanOver(int ranks, at::ScalarType reduce_dtype);

struct GradientBufferOptions {
  at::ScalarType reduce_dtype;    // of the buffer
  at::ScalarType gradient_dtype;  // of the shard's gradient
  GradientScaling scaling;
  // Memory for the shard's gradient, as long as it is with every parameter
  // trained; null: allocated when needed.
  std::shared_ptr<RestingMemory> memory = nullptr;
};

// For each parameter, whether this rank's backward has produced a gradient;
// empty: not known.
using Produced = std::vector<bool>;

// Memory in which gradients have been laid out.
struct ReduceBuffer {
  std::shared_ptr<const GradientLayout> layout;  // null: nothing is trained
  at::Tensor memory;  // 1-D, uint8, at least layout->bytes() long
  Produced produced = {};
  bool is_segment = false;  // holds this rank's segment alone

  bool has_gradients() const { return memory.defined(); }
  // Returns the segment for the shard of `rank`, 1-D of `dtype`; if is_segment,
  // all of it.
  at::Tensor Segment(at::ScalarType dtype, int rank) const;
};

// The gradients of one flat parameter, on their way into a buffer and from
// there to the shard. Not thread-safe.
//
// It lays out gradients of trained parameters, whose shard slices require grad.
// A flag is 1 if this rank's backward has produced the parameter's gradient;
// summed with the rest, it tells every rank whether any rank did. A parameter
// that no rank used keeps an undefined gradient, so that an optimizer does not
// decay it. Reading a device's flags makes the host wait, so that is done only
// if this rank lacks a gradient.
//
// Reduced gradients go into .grad of the shard's slices, as views of memory
// that this object owns or that rests elsewhere.
class FlatGradients {
 public:
  using Layout = std::shared_ptr<const GradientLayout>;

  // `parameter` must outlive this object.
  FlatGradients(flat_param::FlatParameter* parameter,
                GradientBufferOptions options)
      : parameter_(parameter), options_(std::move(options)) {}

  FlatGradients(FlatGradients&&) noexcept = default;
  FlatGradients(const FlatGradients&) = delete;

  const GradientBufferOptions& options() const { return options_; }
  void SetScaling(GradientScaling scaling) { options_.scaling = scaling; }
  const GradientScaling& scaling() const { return options_.scaling; }

  // --- Buffers ------------------------------------------------------------
  // Returns the layout of what is trained, and of what `with` has; null if that
  // is nothing. It is the same object as long as the layout is the same.
  Layout CurrentLayout(const Layout& with = nullptr) const;
  // Returns the size of a buffer with that layout; 0 without one.
  int64_t bytes() const;
  // Returns the size of the shard's gradient for what is trained; 0 for
  // nothing.
  int64_t shard_bytes() const;

  // Return 1-D views of a buffer's memory: all of it, or this rank's segment.
  at::Tensor Whole(const ReduceBuffer& buffer) const;
  at::Tensor OwnSegment(const ReduceBuffer& buffer) const;

  // Writes every element of the buffer. gradients[i] belongs to parameter i. It
  // is undefined, sparse, or of the parameter's shape with any strides (also
  // expanded). It is ignored if the layout lacks the parameter.
  void Fill(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients) const;
  // As Fill(), but adds to what an earlier Fill() has left in the buffer.
  void Add(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients) const;
  // Writes every element of `to` from what `from` has of the same parameters.
  void Convert(const ReduceBuffer& from, ReduceBuffer& to) const;
  // Adds this rank's segment of `from` to that of `to`, matching parameters as
  // Convert() does.
  void AddSegment(const ReduceBuffer& from, ReduceBuffer& to) const;

  // --- The shard's gradient -----------------------------------------------
  // Returns whether Take() is possible, whatever the gradients: with one rank,
  // if a reduction would change neither dtype nor value and nothing of the
  // parameter rests elsewhere.
  bool TakesGradients() const;
  // Makes each gradient that of its slice, or adds it to the one that is there,
  // as LibTorch's leaves do, without a buffer and a reduction. One whose memory
  // nobody else can see is not copied. Returns false, and does nothing, if that
  // is not possible. `gradients` are as for Fill(); the caller drops them.
  bool Take(absl::Span<const at::Tensor> gradients);

  // Takes `buffer` after a sum over all ranks and adds the mean into the
  // gradient of each shard slice. A slice without .grad takes the new values;
  // to .grad, ours or the user's, they are added. Errors are those of
  // RestingMemory.
  absl::Status AccumulateMean(const ReduceBuffer& buffer);

  // The same without a copy, if the mean of one rank would be a plain copy into
  // nothing. The gradient takes the buffer's memory, which nobody else knows,
  // and the buffer the gradient's former memory, as large, or undefined.
  // Returns whether it did so.
  bool TakeOver(ReduceBuffer& buffer);
  // Returns bytes that an earlier buffer has left and no gradient uses, or
  // undefined, for whoever is about to fill a buffer that TakeOver() may take.
  at::Tensor GiveUnused();

  // The same in one go with the reduction, if the slices' gradients allow it: a
  // reduce-scatter puts its scaled sum, a segment, into `out`, and
  // FinishDirect() attaches the gradients when it is done. Several may be under
  // way; they finish in order.
  struct DirectTarget {
    at::Tensor out;
    comm::ScaledSum sum;
  };
  absl::StatusOr<std::optional<DirectTarget>> StartDirect(const Layout& layout);
  void FinishDirect(const Produced& produced = {});

  // Call it after a failure: no direct reduction is under way any more. Memory
  // that they may still write is given to nothing else, so slices whose
  // gradient lies there lose it.
  void ForgetDirect();
  // Call it before the gradient is added to.
  void Prefetch();

  // The memory of attached and future gradients; undefined: it will be new.
  const at::Tensor& values() const { return values_; }
  // Returns how often the host has read flags of a device.
  int64_t flag_reads() const { return flag_reads_; }

  // Frees the memory if no slice has a gradient in it. Returns the bytes of the
  // buffer that TakeOver() took.
  at::Tensor DropUnused();

 private:
  void CopyParameters(const ReduceBuffer& from, ReduceBuffer& to,
                      bool adds) const;
  void PackInto(ReduceBuffer& buffer, absl::Span<const at::Tensor> gradients,
                bool adds) const;
  void AccumulateSlice(int i, const at::Tensor& segment, double scale);
  bool HoldsOurs(int i) const;
  // Whose gradients the slices of a layout have.
  enum class Present { kNone, kOurs, kOthers, kMixed };
  Present PresentGradients(const GradientLayout& layout) const;
  static Use UseFor(Present present);
  absl::Status SetLayout(const Layout& layout);
  void RenewMemory(Present present);
  void Attach(const Produced& produced, const at::Tensor& flags);
  at::Tensor GradientSlice(int i) const;

  flat_param::FlatParameter* const parameter_;
  GradientBufferOptions options_;
  mutable Layout current_layout_;  // of the last CurrentLayout()
  // One segment of layout_. The slices' .grad are views of it.
  at::Tensor values_;
  Layout layout_;
  bool is_taken_over_ = false;
  int64_t flag_reads_ = 0;
  std::deque<Resident> direct_;      // one for each that is under way
  std::vector<Resident> abandoned_;  // of those that were forgotten
};

// The pool that reduce buffers come from. Whoever holds a ReduceBuffer gives
// its memory back, when nobody reads it any more. Not thread-safe.
class ReduceMemory : public BufferPool {
 public:
  ReduceMemory(Allocate allocate, c10::Device device)
      : BufferPool(std::move(allocate)), device_(device) {}

  // Adds `gradients` of the flat parameter of `of`, maybe none, to what
  // `buffer` has, and gives it `layout`. If `may_take`, the buffer may become
  // the gradient of `of` and may use memory that an earlier one has left there.
  absl::Status Collect(FlatGradients& of,
                       absl::Span<const at::Tensor> gradients,
                       const FlatGradients::Layout& layout, bool may_take,
                       ReduceBuffer& buffer);
  // Adds this rank's segment of `buffer` to `sums`, a segment or empty.
  absl::Status AddToSums(const FlatGradients& of, const ReduceBuffer& buffer,
                         ReduceBuffer& sums);

  // Gives the memory back. The current stream and `reader`, which may be null,
  // are the last to use it.
  void GiveBack(ReduceBuffer& buffer, std::unique_ptr<comm::Work> reader);
  // Gives the memory back, if there is any, and drops the layout.
  void DropKept(ReduceBuffer& buffer);
  // Makes discarded bytes, maybe undefined, memory for buffers. The current
  // stream is the last that has used them.
  void TakeBytes(const at::Tensor& memory);

 private:
  const c10::Device device_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_BUFFER_H_
