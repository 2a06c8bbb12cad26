#include "device_ops/pack.h"

#include <ATen/Dispatch.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/check.h"
#include "base/parallel_for.h"
#include "base/tensor_over.h"
#include "device_ops/page_lock.h"
#include "device_ops/vector_loop.h"

namespace fsdp::device_ops {
namespace {

using c10::IntArrayRef;

void CheckPacking(const at::Tensor& out, at::TensorList sources,
                  const Packing& packing) {
  FSDP_CHECK(out.is_contiguous());
  const IntArrayRef pieces = packing.pieces();
  for (size_t i = 0; i < pieces.size(); i += kNumbersOfPiece) {
    const int64_t source = pieces[i];
    const int64_t numel = pieces[i + 3];
    FSDP_CHECK(0 <= pieces[i + 2] && pieces[i + 2] + numel <= out.numel());
    if (source == Packing::kZeros || source == Packing::kOnes) continue;
    FSDP_CHECK(0 <= source && source < static_cast<int64_t>(sources.size()));
    const at::Tensor& from = sources[source];
    FSDP_CHECK(from.is_contiguous() && from.device() == out.device());
    FSDP_CHECK(0 <= pieces[i + 1] && pieces[i + 1] + numel <= from.numel());
  }
}

// Multiplies in the wider of the two dtypes, by operators of LibTorch.
void CopyScaledByTorch(at::Tensor out, const at::Tensor& in, double scale) {
  if (scale == 1) {
    out.copy_(in);
  } else if (out.scalar_type() == in.scalar_type()) {
    at::mul_out(out, in, scale);
  } else if (out.element_size() > in.element_size()) {
    out.copy_(in).mul_(scale);
  } else if (out.element_size() < in.element_size()) {
    out.copy_(in.mul(scale));
  } else {
    out.copy_(in.to(at::kFloat).mul_(scale));
  }
}

// Packs on devices without a kernel of their own.
void PackByTorch(const at::Tensor& out, at::TensorList sources,
                 IntArrayRef pieces, double scale, bool accumulate) {
  for (size_t i = 0; i < pieces.size(); i += kNumbersOfPiece) {
    const at::Tensor to = RangeOf(out, pieces[i + 2], pieces[i + 3]);
    if (pieces[i] < 0) {
      to.fill_(pieces[i] == Packing::kOnes ? 1 : 0);
      continue;
    }
    const at::Tensor from =
        RangeOf(sources[pieces[i]], pieces[i + 1], pieces[i + 3]);
    if (accumulate) {
      to.add_(from, scale);
    } else {
      CopyScaledByTorch(to, from, scale);
    }
  }
}

// --- On the CPU

// Up to this many elements one thread does all.
constexpr int64_t kGrain = 64 << 10;
// From this size on, a buffer has left a core's caches, for other tensors of
// backward, before it is read.
constexpr int64_t kTooMuchForCaches = 4 << 20;
constexpr int64_t kFewBytes = 16 << 10;

template <typename In, typename Out>
void CopyLoop(const In* in, int64_t numel, bool past_caches, Out* out) {
  if constexpr (std::is_same_v<In, Out>) {
    const auto bytes = numel * static_cast<int64_t>(sizeof(In));
    if (past_caches && bytes > kFewBytes) return StreamingCopy(out, in, bytes);
    std::memcpy(out, in, bytes);
  } else {
    RunVectorised([=]() FSDP_VECTOR_LOOP {
      for (int64_t i = 0; i < numel; ++i) {
        out[i] = Narrow<Out>(Widen<Wider<In, Out>>(in[i]));
      }
    });
  }
}

struct Scaling {
  double scale;
  bool accumulate;
  bool past_caches;  // of copies
};

template <typename Out>
void Write(const PackedRange& range, int64_t begin, int64_t end,
           const Scaling& scaling, Out* out) {
  Out* const to = out + range.begin + begin;
  const int64_t numel = end - begin;
  if (range.source == nullptr) {
    std::fill(to, to + numel,
              static_cast<Out>(static_cast<float>(range.value)));
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, range.dtype, "pack_", [&] {
        const scalar_t* from =
            static_cast<const scalar_t*>(range.source) + begin;
        if (scaling.accumulate) {
          ScaleLoop<true>(from, numel, scaling.scale, to);
        } else if (scaling.scale == 1) {
          CopyLoop(from, numel, scaling.past_caches, to);
        } else {
          ScaleLoop<false>(from, numel, scaling.scale, to);
        }
      });
}

template <typename Out>
void WriteAll(const std::vector<PackedRange>& ranges, const Scaling& scaling,
              Out* out) {
  std::vector<int64_t> ends;  // as if the ranges followed each other
  ends.reserve(ranges.size());
  int64_t total = 0;
  for (const PackedRange& range : ranges) ends.push_back(total += range.numel);
  ParallelFor(total, kGrain, [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t first = ends[i] - ranges[i].numel;
      const int64_t last = std::min(end, ends[i]);
      Write(ranges[i], begin - first, last - first, scaling, out);
      begin = last;
      ++i;
    }
  });
}

void PackOnCpu(const at::Tensor& out, at::TensorList sources,
               IntArrayRef pieces, double scale, bool accumulate) {
  const std::vector<PackedRange> ranges = PackedRanges(sources, pieces);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "pack_", [&] {
        const bool past_caches =
            static_cast<int64_t>(out.nbytes()) >= kTooMuchForCaches;
        WriteAll(ranges, {scale, accumulate, past_caches},
                 out.mutable_data_ptr<scalar_t>());
      });
}

TORCH_LIBRARY_FRAGMENT(libtorch_fsdp, m) {
  m.def(
      "pack_(Tensor(a!) out, Tensor[] sources, int[] pieces, float scale, "
      "bool accumulate) -> ()");
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, CompositeExplicitAutograd, m) {
  m.impl("pack_", &PackByTorch);
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, CPU, m) { m.impl("pack_", &PackOnCpu); }

}  // namespace

void Packing::AddPiece(int64_t source, int64_t source_begin, int64_t out_begin,
                       int64_t numel) {
  Occupy(out_begin, out_begin + numel);
  pieces_.insert(pieces_.end(), {source, source_begin, out_begin, numel});
}

void Packing::Occupy(int64_t begin, int64_t end) {
  FSDP_CHECK(begin <= end);
  if (begin == end) return;
  const auto after = occupied_.lower_bound(begin);
  FSDP_CHECK(after == occupied_.end() || end <= after->first);
  if (after != occupied_.begin()) {
    int64_t& end_before = std::prev(after)->second;
    FSDP_CHECK(end_before <= begin);
    if (end_before == begin) {
      end_before = end;
      return;
    }
  }
  occupied_.emplace_hint(after, begin, end);
}

void Pack(const at::Tensor& out, at::TensorList sources, const Packing& packing,
          double scale, bool accumulate) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("libtorch_fsdp::pack_", "")
                             .typed<decltype(PackByTorch)>();
  CheckPacking(out, sources, packing);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(out, sources, packing.pieces(), scale, accumulate);
}

void CopyScaled(const at::Tensor& out, const at::Tensor& in, double scale,
                bool accumulate) {
  FSDP_CHECK(out.numel() == in.numel());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // With two dtypes, LibTorch's add_() would first convert into memory of its
  // own on the CPU, and would not round the product on CUDA.
  if (out.scalar_type() != in.scalar_type() && (accumulate || scale != 1)) {
    Packing all;
    all.AddPiece(0, 0, 0, in.numel());
    Pack(out, at::TensorList(in), all, scale, accumulate);
  } else if (accumulate) {
    out.add_(in, scale);
  } else {
    CopyScaledByTorch(out, in, scale);
  }
}

std::vector<PackedRange> PackedRanges(at::TensorList sources,
                                      IntArrayRef pieces) {
  std::vector<PackedRange> packed;
  packed.reserve(pieces.size() / kNumbersOfPiece);
  for (size_t i = 0; i < pieces.size(); i += kNumbersOfPiece) {
    if (pieces[i + 3] == 0) continue;
    PackedRange& range = packed.emplace_back(
        PackedRange{nullptr, at::kFloat, pieces[i + 2], pieces[i + 3], 0});
    if (pieces[i] < 0) {
      range.value = pieces[i] == Packing::kOnes ? 1 : 0;
      continue;
    }
    const at::Tensor& source = sources[pieces[i]];
    const auto offset =
        pieces[i + 1] * static_cast<int64_t>(source.element_size());
    range.source = static_cast<const char*>(source.const_data_ptr()) + offset;
    range.dtype = source.scalar_type();
  }
  return packed;
}

}  // namespace fsdp::device_ops
