#include "examples/llama/model/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "examples/llama/model/rope_config.h"

namespace llama {
namespace {

using Type = RopeScaling::Type;

// Between the pair that turns `high` times in `tokens`, which stays, and the
// one that turns `low` times.
at::Tensor ScaledByYarn(const at::Tensor& frequencies, const RopeConfig& rope) {
  const RopeScaling& scaling = *rope.scaling;
  const auto pairs = static_cast<double>(frequencies.numel());
  const auto pair_of = [&](double turns) {
    const double pi = std::acos(-1.0);
    const double wavelength = static_cast<double>(scaling.tokens) / turns;
    return pairs * std::log(wavelength / (2 * pi)) / std::log(rope.theta);
  };
  const double first = std::max(std::floor(pair_of(scaling.high)), 0.0);
  double last = std::min(std::ceil(pair_of(scaling.low)), 2 * pairs - 1);
  if (first == last) last += 0.001;
  const at::Tensor scaled =
      ((at::arange(frequencies.numel(), frequencies.options()) - first) /
       (last - first))
          .clamp(0, 1);
  return frequencies / scaling.factor * scaled + frequencies * (1 - scaled);
}

at::Tensor Scaled(const at::Tensor& frequencies, const RopeConfig& rope) {
  const RopeScaling& scaling = *rope.scaling;
  if (scaling.type == Type::kDynamic) return frequencies;
  if (scaling.type == Type::kLinear) return frequencies / scaling.factor;
  if (scaling.type == Type::kYarn) return ScaledByYarn(frequencies, rope);
  const double pi = std::acos(-1.0);
  const auto tokens = static_cast<double>(scaling.tokens);
  const double low = scaling.low, high = scaling.high;
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
  return rope.scaling ? Scaled(frequencies, rope) : frequencies;
}

RotaryTables MakeRotaryTables(const RopeConfig& rope, int64_t head_dim,
                              const at::Tensor& positions,
                              c10::ScalarType dtype) {
  RopeConfig used = rope;
  if (rope.scaling && rope.scaling->type == Type::kDynamic &&
      positions.numel() > 0) {
    const double longer = (positions.max().item<double>() + 1) /
                          static_cast<double>(rope.scaling->tokens);
    const auto size = static_cast<double>(head_dim);
    used.theta *=
        std::pow(rope.scaling->factor * (std::max(longer, 1.0) - 1) + 1,
                 size / (size - 2));
  }
  const at::Tensor half =
      positions.to(at::kFloat).unsqueeze(-1) *
      InverseFrequencies(used, head_dim, positions.device());
  const at::Tensor angles = at::cat({half, half}, -1);
  const double factor = rope.scaling ? rope.scaling->attention_factor : 1;
  return {(angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)};
}

at::Tensor Rotate(const at::Tensor& x, const RotaryTables& tables) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  const at::Tensor turned = at::cat({-halves[1], halves[0]}, -1);
  return x * tables.cos + turned * tables.sin;
}

}  // namespace llama
