#include "offload/checksum.h"

#include <string>

#include "gtest/gtest.h"

namespace fsdp::offload {
namespace {

// Computes CRC32C bit by bit, as RFC 3720 defines it.
uint32_t Oracle(absl::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    }
  }
  return ~crc;
}

std::string Bytes(int64_t size) {
  std::string bytes(size, '\0');
  uint32_t state = 12345;
  for (char& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

void Flip(std::string& bytes, size_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
}

TEST(ChecksumTest, KnownValues) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(ChecksumTest, AgreesWithTheDefinition) {
  for (const int64_t size : {0, 1, 7, 8, 63, 255, 1021, 4096, 65537}) {
    const std::string bytes = Bytes(size);
    EXPECT_EQ(Crc32c(bytes), Oracle(bytes)) << size;
  }
}

TEST(ChecksumTest, GoesOnFromTheBytesBefore) {
  const std::string bytes = Bytes(10007);
  const absl::string_view all = bytes;
  for (const int64_t front : {0, 1, 4097, 10007}) {
    EXPECT_EQ(Crc32c(all.substr(front), Crc32c(all.substr(0, front))),
              Crc32c(all));
  }
}

TEST(ChecksumTest, TellsEverySingleFlippedBit) {
  std::string bytes = Bytes(521);
  const uint32_t good = Crc32c(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Flip(bytes, bit);
    EXPECT_NE(Crc32c(bytes), good) << bit;
    Flip(bytes, bit);
  }
}

}  // namespace
}  // namespace fsdp::offload
