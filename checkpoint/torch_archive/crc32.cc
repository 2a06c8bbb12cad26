#include "checkpoint/torch_archive/crc32.h"

#include <array>
#include <cstddef>
#include <cstring>

namespace fsdp::checkpoint {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // bits reversed: x^0 is on top
constexpr int kSlices = 8;

using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][byte]: of the byte with k zero bytes behind it.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = crc;
  }
  for (int k = 1; k < kSlices; ++k) {
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

// The product of two polynomials modulo the CRC's.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

}  // namespace

uint32_t Crc32(absl::string_view bytes, uint32_t before) {
  uint32_t crc = ~before;
  const char* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= kSlices; data += kSlices, left -= kSlices) {
    uint32_t low = 0;
    uint32_t high = 0;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^
          kTables[5][(low >> 16) & 0xff] ^ kTables[4][low >> 24] ^
          kTables[3][high & 0xff] ^ kTables[2][(high >> 8) & 0xff] ^
          kTables[1][(high >> 16) & 0xff] ^ kTables[0][high >> 24];
  }
  for (; left > 0; ++data, --left) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint8_t>(*data)) & 0xff];
  }
  return ~crc;
}

uint32_t CombineCrc32(uint32_t first, uint32_t second, int64_t second_bytes) {
  // x^(8 * second_bytes), by squaring.
  uint32_t shift = 0x80000000;  // 1
  uint32_t power = 0x00800000;  // x^8
  for (int64_t left = second_bytes; left > 0; left >>= 1) {
    if ((left & 1) != 0) shift = Multiply(shift, power);
    power = Multiply(power, power);
  }
  return Multiply(shift, first) ^ second;
}

}  // namespace fsdp::checkpoint
