#include "tools/checkpoint/tensor_figures.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"

namespace fsdp::checkpoint::tool {

void TensorFigures::Add(absl::Span<const double> values) {
  // Sums of parts keep what one long sum would lose.
  double part = 0;
  double part_squares = 0;
  for (const double value : values) {
    if (std::isnan(value)) {
      ++nans;
    } else if (std::isinf(value)) {
      ++infinities;
    } else {
      ++finite;
      if (value == 0) ++zeros;
      min = std::min(min, value);
      max = std::max(max, value);
      part += value;
      part_squares += value * value;
    }
  }
  sum += part;
  squares += part_squares;
}

double TensorFigures::Mean() const { return sum / static_cast<double>(finite); }

double TensorFigures::Norm() const { return std::sqrt(squares); }

void Differences::Add(int64_t first, absl::Span<const double> a,
                      absl::Span<const double> b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    ++elements;
    const double difference = std::abs(a[i] - b[i]);
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
      ++not_finite;
      continue;
    }
    relative = std::max(relative,
                        difference / std::max(std::abs(a[i]), std::abs(b[i])));
    if (difference > absolute || at < 0) {
      absolute = difference;
      at = first + static_cast<int64_t>(i);
    }
  }
}

std::string NumberText(double value) { return absl::StrFormat("%.6g", value); }

namespace {

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
T Load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Calls `use` with a function that reads an element of the dtype as its own
// type; false for those that are no numbers.
template <typename Use>
bool WithReader(Dtype dtype, Use use) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kU8:
      use(Load<uint8_t>);
      return true;
    case Dtype::kI8:
      use(Load<int8_t>);
      return true;
    case Dtype::kI16:
      use(Load<int16_t>);
      return true;
    case Dtype::kU16:
      use(Load<uint16_t>);
      return true;
    case Dtype::kI32:
      use(Load<int32_t>);
      return true;
    case Dtype::kU32:
      use(Load<uint32_t>);
      return true;
    case Dtype::kI64:
      use(Load<int64_t>);
      return true;
    case Dtype::kU64:
      use(Load<uint64_t>);
      return true;
    case Dtype::kF16:
      use([](const char* at) { return FromF16(Load<uint16_t>(at)); });
      return true;
    case Dtype::kBF16:
      use([](const char* at) { return FromBF16(Load<uint16_t>(at)); });
      return true;
    case Dtype::kF32:
      use(Load<float>);
      return true;
    case Dtype::kF64:
      use(Load<double>);
      return true;
    default:
      return false;
  }
}

std::string NumberText(double value, int digits) {
  return absl::StrFormat("%.*g", digits, value);
}

}  // namespace

bool IsNumber(Dtype dtype) {
  return WithReader(dtype, [](auto) {});
}

double FromF16(uint16_t bits) {
  constexpr int kMantissa = 10;
  const double sign = bits >> 15 != 0 ? -1 : 1;
  const int exponent = bits >> kMantissa & 0x1f;
  const int mantissa = bits & ((1 << kMantissa) - 1);
  if (exponent == 0x1f) {
    return std::copysign(mantissa == 0 ? INFINITY : NAN, sign);
  }
  const int whole = exponent == 0 ? mantissa : mantissa + (1 << kMantissa);
  const int power = (exponent == 0 ? 1 : exponent) - 15 - kMantissa;
  return sign * std::ldexp(static_cast<double>(whole), power);
}
double FromBF16(uint16_t bits) {
  return BitCast<float>(static_cast<uint32_t>(bits) << 16);
}

void AppendNumbers(Dtype dtype, absl::Span<const char> bytes,
                   std::vector<double>& out) {
  const auto item = static_cast<size_t>(ItemBytes(dtype));
  const bool is_number = WithReader(dtype, [&](auto read) {
    for (size_t at = 0; at + item <= bytes.size(); at += item) {
      out.push_back(static_cast<double>(read(bytes.data() + at)));
    }
  });
  FSDP_CHECK(is_number);
}

std::string ElementText(Dtype dtype, absl::string_view bytes) {
  std::string text;
  switch (dtype) {
    case Dtype::kBool:
      return bytes[0] != 0 ? "true" : "false";
    case Dtype::kU8:
      return absl::StrCat(Load<uint8_t>(bytes.data()));
    case Dtype::kI8:
      return absl::StrCat(Load<int8_t>(bytes.data()));
    case Dtype::kF16:
      return NumberText(FromF16(Load<uint16_t>(bytes.data())), 5);
    case Dtype::kBF16:
      return NumberText(FromBF16(Load<uint16_t>(bytes.data())), 4);
    case Dtype::kF32:
      return NumberText(Load<float>(bytes.data()), 9);
    case Dtype::kF64:
      return NumberText(Load<double>(bytes.data()), 17);
    default:
      break;
  }
  const bool is_number = WithReader(
      dtype, [&](auto read) { text = absl::StrCat(read(bytes.data())); });
  return is_number ? text : absl::StrCat("0x", absl::BytesToHexString(bytes));
}

}  // namespace fsdp::checkpoint::tool
