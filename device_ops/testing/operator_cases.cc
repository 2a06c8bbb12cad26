#include "device_ops/testing/operator_cases.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <sstream>

namespace fsdp::device_ops::testing {

at::Tensor RandomNumbers(at::ScalarType dtype, int64_t size, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  at::Tensor numbers =
      at::empty({size}, at::TensorOptions().dtype(at::kDouble));
  double* const data = numbers.mutable_data_ptr<double>();
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t kind = random() % 16;
    const double magnitude = kind == 0 ? 1e-41 : kind == 1 ? 1e-6 : 1;
    data[i] = kind == 2   ? (i % 2 == 0 ? 0.0 : -0.0)
              : kind == 3 ? 60'000 * std::tanh(normal(random))
                          : magnitude * normal(random);
  }
  return numbers.to(dtype);
}

std::string Difference(const at::Tensor& actual, const at::Tensor& expected) {
  std::ostringstream text;
  if (actual.scalar_type() != expected.scalar_type() ||
      actual.sizes() != expected.sizes()) {
    text << actual.toString() << " " << actual.sizes() << " and "
         << expected.toString() << " " << expected.sizes();
    return text.str();
  }
  const at::Tensor a = actual.contiguous();
  const at::Tensor b = expected.contiguous();
  const auto size = static_cast<int64_t>(a.element_size());
  const char* const a_data = static_cast<const char*>(a.const_data_ptr());
  const char* const b_data = static_cast<const char*>(b.const_data_ptr());
  if (a.nbytes() == 0 || std::memcmp(a_data, b_data, a.nbytes()) == 0) {
    return "";
  }
  const at::Tensor a_numbers = a.to(at::kDouble).reshape({-1});
  const at::Tensor b_numbers = b.to(at::kDouble).reshape({-1});
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (std::memcmp(a_data + i * size, b_data + i * size, size) == 0) continue;
    const double x = a_numbers.const_data_ptr<double>()[i];
    const double y = b_numbers.const_data_ptr<double>()[i];
    if (std::isnan(x) && std::isnan(y)) continue;
    text.precision(17);
    text << "element " << i << " of " << a.numel() << " is " << x
         << " and should be " << y;
    return text.str();
  }
  return "";
}

PackCase MakePackCase(int64_t size, int pieces) {
  PackCase result;
  std::vector<int64_t> used;  // of each source
  for (at::ScalarType dtype : kDtypes) {
    result.sources.push_back(
        RandomNumbers(dtype, size, static_cast<int>(used.size())));
    used.push_back(0);
  }
  int64_t end = 0;
  for (int i = 0; i < pieces; ++i) {
    const int64_t source = (i * 7 + i / 4) % 4;
    const int64_t left = size - used[source];
    const int64_t numel = std::min(left, 1 + size * (1 + i % 3) / (pieces + 1));
    if (i % 3 == 0) {
      result.packing.AddZeros(end, end + i % 5);
      end += i % 5;
    } else if (i % 3 == 1) {
      result.packing.AddOnes(end, end + 3);
      end += 3;
    }
    result.packing.AddPiece(source, used[source], end, numel);
    used[source] += numel;
    end += numel;
  }
  result.out_size = end;
  return result;
}

}  // namespace fsdp::device_ops::testing
