#include "tools/checkpoint/elements.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr int kDoubleMantissa = 52;
constexpr int kDoubleBias = 1023;

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A float of 16 bits: a sign, its exponent, and a mantissa of kMantissa bits.
template <int kMantissa>
struct Half {
  static constexpr int kBias = (1 << (14 - kMantissa)) - 1;
  static constexpr int kMaxExponent = (1 << (15 - kMantissa)) - 1;
  static constexpr uint16_t kInfinity = kMaxExponent << kMantissa;
  static constexpr uint16_t kQuiet = 1 << (kMantissa - 1);

  static uint16_t Encode(double value) {
    const auto bits = BitCast<uint64_t>(value);
    const auto sign = static_cast<uint16_t>(bits >> 63 << 15);
    if (std::isnan(value)) return sign | kInfinity | kQuiet;
    const int exponent =
        static_cast<int>(bits >> kDoubleMantissa & 0x7ff) - kDoubleBias;
    if (exponent > kBias) return sign | kInfinity;
    constexpr uint64_t kOne = uint64_t{1} << kDoubleMantissa;
    const uint64_t mantissa = (bits & (kOne - 1)) | kOne;
    int biased = exponent + kBias;
    int drop = kDoubleMantissa - kMantissa;
    if (biased < 1) {
      drop += 1 - biased;
      biased = 0;
    }
    // Less than half of the smallest one.
    if (drop > kDoubleMantissa + 1) return sign;
    uint64_t kept = mantissa >> drop;
    const uint64_t rest = mantissa & ((uint64_t{1} << drop) - 1);
    const uint64_t half = uint64_t{1} << (drop - 1);
    if (rest > half || (rest == half && kept % 2 == 1)) ++kept;
    // What rounding carries goes into the exponent, up to infinity.
    if (biased > 0) {
      kept += (static_cast<uint64_t>(biased) << kMantissa) -
              (uint64_t{1} << kMantissa);
    }
    return static_cast<uint16_t>(sign | kept);
  }

  static double Decode(uint16_t bits) {
    const double sign = bits >> 15 != 0 ? -1 : 1;
    const int exponent = bits >> kMantissa & kMaxExponent;
    const int mantissa = bits & ((1 << kMantissa) - 1);
    if (exponent == kMaxExponent) {
      return std::copysign(mantissa == 0 ? INFINITY : NAN, sign);
    }
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << kMantissa);
    const int power = (exponent == 0 ? 1 : exponent) - kBias - kMantissa;
    return sign * std::ldexp(static_cast<double>(whole), power);
  }
};

using F16 = Half<10>;
using BF16 = Half<7>;

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

// Calls `use` with a function that makes an element of the dtype, and one that
// says whether that is infinite.
template <typename Use>
void WithWriter(Dtype dtype, Use use) {
  const auto is_infinite = [](auto value) { return std::isinf(value); };
  switch (dtype) {
    case Dtype::kF16:
      return use(F16::Encode, [](uint16_t bits) {
        return (bits & 0x7fff) == F16::kInfinity;
      });
    case Dtype::kBF16:
      return use(BF16::Encode, [](uint16_t bits) {
        return (bits & 0x7fff) == BF16::kInfinity;
      });
    case Dtype::kF32:
      return use([](double value) { return static_cast<float>(value); },
                 is_infinite);
    default:
      return use([](double value) { return value; }, is_infinite);
  }
}

std::string NumberText(double value, int digits) {
  return absl::StrFormat("%.*g", digits, value);
}

}  // namespace

bool IsFloat(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 ||
         dtype == Dtype::kF32 || dtype == Dtype::kF64;
}

bool IsNumber(Dtype dtype) {
  return WithReader(dtype, [](auto) {});
}

uint16_t ToF16(double value) { return F16::Encode(value); }
uint16_t ToBF16(double value) { return BF16::Encode(value); }
double FromF16(uint16_t bits) { return F16::Decode(bits); }
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

std::optional<double> AppendCast(Dtype from, absl::Span<const char> bytes,
                                 Dtype to, std::string& out) {
  FSDP_CHECK(IsFloat(from) && IsFloat(to));
  const auto item = static_cast<size_t>(ItemBytes(from));
  std::optional<double> too_large;
  const size_t before = out.size();
  const size_t count = bytes.size() / item;
  out.resize(before + count * static_cast<size_t>(ItemBytes(to)));
  WithReader(from, [&](auto read) {
    WithWriter(to, [&](auto write, auto is_infinite) {
      char* target = &out[before];
      for (size_t i = 0; i < count; ++i) {
        const auto value = static_cast<double>(read(bytes.data() + i * item));
        const auto element = write(value);
        std::memcpy(target, &element, sizeof(element));
        target += sizeof(element);
        if (is_infinite(element) && std::isfinite(value) && !too_large) {
          too_large = value;
        }
      }
    });
  });
  return too_large;
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
