#include "base/testing/status_matchers.h"
#include "fsdp/options/options.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(QuantizationTest, NamesWhatIsOutOfRange) {
  Quantization quantization;
  quantization.block = 0;
  EXPECT_THAT(quantization.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a block of 0 numbers")));
  quantization.block = (int64_t{1} << 30) + 1;
  EXPECT_THAT(quantization.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a block of 1073741825 numbers")));
  quantization.block = 1;
  EXPECT_OK(quantization.Validate());
  quantization.min_bytes = -1;
  EXPECT_THAT(quantization.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("min_bytes is -1")));
}

TEST(QuantizationTest, TheTextTellsEveryChoiceThatRanksShare) {
  Quantization quantization;
  quantization.gather = true;
  EXPECT_EQ(quantization.ToString(),
            "gathers in blocks of 256 from 0 bytes on");
  quantization.reduce = true;
  quantization.block = 64;
  quantization.min_bytes = 1000;
  EXPECT_EQ(quantization.ToString(),
            "gathers, sums in blocks of 64 from 1000 bytes on");
  quantization.gather = false;
  EXPECT_EQ(quantization.ToString(), "sums in blocks of 64 from 1000 bytes on");
}

}  // namespace
}  // namespace fsdp
