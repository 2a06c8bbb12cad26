#include <c10/core/ScalarType.h>

#include "checkpoint/format/tensor_info.h"
#include "checkpoint/run/run_values.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

TEST(TorchDtypeTest, ThereAndBackWithElementsOfOneSize) {
  int shared = 0;
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const auto torch = TorchDtype(dtype);
    if (!torch.has_value()) {
      // Those that do not fill bytes are all that LibTorch lacks.
      EXPECT_EQ(ItemBytes(dtype), 0) << NameOf(dtype);
      continue;
    }
    ++shared;
    EXPECT_EQ(FileDtype(*torch), dtype) << NameOf(dtype);
    EXPECT_EQ(static_cast<int64_t>(c10::elementSize(*torch)), ItemBytes(dtype))
        << NameOf(dtype);
  }
  EXPECT_EQ(shared, 19);
}

TEST(TorchDtypeTest, NamesAgree) {
  EXPECT_EQ(FileDtype(c10::kBFloat16), Dtype::kBF16);
  EXPECT_EQ(FileDtype(c10::kHalf), Dtype::kF16);
  EXPECT_EQ(FileDtype(c10::kFloat8_e4m3fn), Dtype::kF8E4M3);
  EXPECT_EQ(FileDtype(c10::kFloat8_e4m3fnuz), Dtype::kF8E4M3Fnuz);
  EXPECT_EQ(FileDtype(c10::kComplexFloat), Dtype::kC64);
  EXPECT_FALSE(FileDtype(c10::kComplexDouble).has_value());
  EXPECT_FALSE(FileDtype(c10::kQInt8).has_value());
}

}  // namespace
}  // namespace fsdp::checkpoint
