#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "absl/strings/string_view.h"
#include "checkpoint/files/checksums.h"
#include "gtest/gtest.h"
#include "offload/checksum.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::offload::Crc32c;

std::string RandomBytes(size_t size) {
  std::mt19937 random(size + 1);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST(Crc32cCombineTest, IsThatOfTheWhole) {
  const int64_t sizes[] = {0, 1, 2, 3, 7, 4093, 4096, 65537, 1 << 20};
  for (const int64_t first : sizes) {
    for (const int64_t second : sizes) {
      const std::string bytes = RandomBytes(first + second);
      const absl::string_view whole = bytes;
      EXPECT_EQ(Crc32cCombine(Crc32c(whole.substr(0, first)),
                              Crc32c(whole.substr(first)), second),
                Crc32c(whole))
          << first << " and " << second;
    }
  }
}

TEST(Crc32cCombineTest, HugeSizesAreSumsOfSmallOnes) {
  for (const int64_t size :
       {int64_t{1} << 28, int64_t{1} << 29, int64_t{5} << 33,
        (int64_t{1} << 47) + 12345, std::numeric_limits<int64_t>::max()}) {
    const int64_t half = size / 3;
    // The checksum of "a" is only shifted by the zeros behind it.
    const uint32_t at_once = Crc32cCombine(Crc32c("a"), 0, size);
    const uint32_t twice =
        Crc32cCombine(Crc32cCombine(Crc32c("a"), 0, half), 0, size - half);
    EXPECT_EQ(at_once, twice) << size;
  }
}

TEST(Crc32cCombineTest, AGigabyteOfZeros) {
  uint32_t direct = Crc32c("a");
  const std::string zeros(1 << 20, '\0');
  uint32_t of_zeros = 0;
  for (int i = 0; i < 1024; ++i) {
    direct = Crc32c(zeros, direct);
    of_zeros = Crc32c(zeros, of_zeros);
  }
  EXPECT_EQ(Crc32cCombine(Crc32c("a"), of_zeros, int64_t{1} << 30), direct);
}

}  // namespace
}  // namespace fsdp::checkpoint
