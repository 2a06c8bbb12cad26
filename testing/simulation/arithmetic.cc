#include "testing/simulation/arithmetic.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/check.h"

namespace fsdp::simulation {
namespace {

using ::fsdp::comm::ReduceOp;

// The type in which a sum of T is computed; that of integers wraps.
template <typename T, bool is_integer = std::is_integral<T>::value>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double, false> {
  using type = double;
};
template <typename T>
struct WideOf<T, true> {
  using type = T;
};

template <typename T>
T Add(T a, T b) {
  if constexpr (std::is_integral<T>::value) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  } else {
    return a + b;
  }
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kSum) return Add(a, b);
  // NaN is unequal to itself. NOLINTBEGIN(misc-redundant-expression)
  if (a != a) return a;
  if (b != b) return b;
  // NOLINTEND(misc-redundant-expression)
  return (op == ReduceOp::kMin) == (b < a) ? b : a;
}

template <typename T>
T ElementOf(const char* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <typename T>
void SetElement(std::vector<char>& data, int64_t index, T value) {
  std::memcpy(&data[index * sizeof(T)], &value, sizeof(T));
}

// NOLINTBEGIN(bugprone-branch-clone): of several types.
template <typename Function>
auto WithType(at::ScalarType dtype, const Function& function) {
  switch (dtype) {
    case at::kFloat:
      return function(float());
    case at::kDouble:
      return function(double());
    case at::kHalf:
      return function(c10::Half());
    case at::kBFloat16:
      return function(c10::BFloat16());
    case at::kInt:
      return function(int32_t());
    case at::kLong:
      return function(int64_t());
    case at::kByte:
      return function(uint8_t());
    default:
      FSDP_CHECK(false);
      return function(float());
  }
}
// NOLINTEND(bugprone-branch-clone)

double AsDouble(at::ScalarType dtype, const char* data, int64_t index) {
  return WithType(dtype, [&](auto zero) {
    return static_cast<double>(ElementOf<decltype(zero)>(data, index));
  });
}

}  // namespace

std::vector<char> ReduceInOrder(at::ScalarType dtype, ReduceOp op,
                                const std::vector<const char*>& inputs,
                                int64_t count) {
  return WithType(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Wide = typename WideOf<T>::type;
    std::vector<char> out(count * sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      Wide value = static_cast<Wide>(ElementOf<T>(inputs[0], i));
      for (size_t rank = 1; rank < inputs.size(); ++rank) {
        value = Combine<Wide>(op, value,
                              static_cast<Wide>(ElementOf<T>(inputs[rank], i)));
      }
      SetElement(out, i, static_cast<T>(value));
    }
    return out;
  });
}

std::vector<char> ScaleInto(at::ScalarType dtype, const std::vector<char>& sum,
                            comm::ScaledSum scaled, at::ScalarType out_dtype,
                            const std::vector<char>& before) {
  const bool in_double = dtype == at::kDouble || out_dtype == at::kDouble;
  return WithType(out_dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<char> out(before.size());
    const auto count = static_cast<int64_t>(out.size() / sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
      const double value = AsDouble(dtype, sum.data(), i);
      const double old =
          scaled.accumulate ? AsDouble(out_dtype, before.data(), i) : 0;
      // float32 arithmetic, rounded after each operation.
      const float product =
          static_cast<float>(scaled.scale) * static_cast<float>(value);
      const float rounded =
          scaled.accumulate ? static_cast<float>(old) + product : product;
      const double exact =
          scaled.accumulate ? old + scaled.scale * value : scaled.scale * value;
      SetElement(out, i, static_cast<T>(in_double ? exact : double{rounded}));
    }
    return out;
  });
}

}  // namespace fsdp::simulation
