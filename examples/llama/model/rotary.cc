#include "examples/llama/model/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "examples/llama/model/rope_config.h"

namespace llama {
namespace {

at::Tensor Scaled(const at::Tensor& frequencies, const Llama3Scaling& scaling) {
  const double pi = std::acos(-1.0);
  const auto tokens =
      static_cast<double>(scaling.original_max_position_embeddings);
  const double low = scaling.low_freq_factor, high = scaling.high_freq_factor;
  const at::Tensor wavelengths = frequencies.reciprocal() * (2 * pi);
  const at::Tensor is_long = wavelengths > tokens / low;
  const at::Tensor is_short = wavelengths < tokens / high;
  const at::Tensor smooth =
      (wavelengths.reciprocal() * tokens - low) / (high - low);
  const at::Tensor between =
      (1 - smooth) * frequencies / scaling.factor + smooth * frequencies;
  return at::where(is_long, frequencies / scaling.factor,
                   at::where(is_short, frequencies, between));
}

}  // namespace

at::Tensor InverseFrequencies(const RopeConfig& rope, int64_t head_dim,
                              c10::Device device) {
  const auto options = c10::TensorOptions(at::kFloat).device(device);
  const at::Tensor exponents =
      at::arange(0, head_dim, 2, options) / static_cast<double>(head_dim);
  const at::Tensor frequencies = at::pow(rope.theta, exponents).reciprocal();
  return rope.scaling ? Scaled(frequencies, *rope.scaling) : frequencies;
}

RotaryTables MakeRotaryTables(const RopeConfig& rope, int64_t head_dim,
                              const at::Tensor& positions,
                              c10::ScalarType dtype) {
  const at::Tensor half =
      positions.to(at::kFloat).unsqueeze(-1) *
      InverseFrequencies(rope, head_dim, positions.device());
  const at::Tensor angles = at::cat({half, half}, -1);
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

at::Tensor Rotate(const at::Tensor& x, const RotaryTables& tables) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  const at::Tensor turned = at::cat({-halves[1], halves[0]}, -1);
  return x * tables.cos + turned * tables.sin;
}

}  // namespace llama
