// libtorch_fsdp::pack_ on the CPU.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "device_ops/packed_range.h"
#include "device_ops/vector_loop.h"

namespace fsdp::device_ops {
namespace {

// Each thread gets at least this many elements.
constexpr int64_t kGrain = 64 << 10;

template <typename In, typename Out>
void CopyLoop(const In* in, int64_t numel, Out* out) {
  if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(out, in, numel * sizeof(In));
  } else {
    RunVectorised([=]() FSDP_VECTOR_LOOP {
      for (int64_t i = 0; i < numel; ++i) {
        out[i] = Narrow<Out>(Widen<Wider<In, Out>>(in[i]));
      }
    });
  }
}

template <typename In, typename Out>
void ScaleLoop(const In* in, int64_t numel, double scale, Out* out) {
  using Computed = Wider<In, Out>;
  const auto factor = static_cast<Computed>(scale);
  RunVectorised([=]() FSDP_VECTOR_LOOP {
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = Narrow<Out>(factor * Widen<Computed>(in[i]));
    }
  });
}

template <typename In, typename Out>
void AddLoop(const In* in, int64_t numel, double scale, Out* out) {
  using Computed = Wider<In, Out>;
  const auto factor = static_cast<Computed>(scale);
  RunVectorised([=]() FSDP_VECTOR_LOOP {
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = Narrow<Out>(Widen<Computed>(out[i]) +
                           factor * Widen<Computed>(in[i]));
    }
  });
}

struct Scaling {
  double scale;
  bool accumulate;
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
          AddLoop(from, numel, scaling.scale, to);
        } else if (scaling.scale == 1) {
          CopyLoop(from, numel, to);
        } else {
          ScaleLoop(from, numel, scaling.scale, to);
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
  at::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
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
               c10::IntArrayRef pieces, c10::IntArrayRef zeros,
               c10::IntArrayRef ones, double scale, bool accumulate) {
  const std::vector<PackedRange> ranges =
      PackedRanges(sources, pieces, zeros, ones);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), "pack_", [&] {
        WriteAll(ranges, {scale, accumulate}, out.mutable_data_ptr<scalar_t>());
      });
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, CPU, m) { m.impl("pack_", &PackOnCpu); }

}  // namespace
}  // namespace fsdp::device_ops
