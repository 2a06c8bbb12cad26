#include "examples/llama/data/permutation.h"

#include "base/check.h"

namespace llama {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 62;

// The output function of SplitMix64 (Steele, Lea, Flood: Fast Splittable
// Pseudorandom Number Generators, OOPSLA 2014).
uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

uint64_t MixSeeds(uint64_t seed, uint64_t number) {
  return Mix(Mix(seed + 0x9e3779b97f4a7c15) + number);
}

Permutation::Permutation(int64_t size, uint64_t seed) : size_(size) {
  FSDP_CHECK(size >= 1 && size <= kMaxSize);
  while (int64_t{1} << 2 * half_bits_ < size) ++half_bits_;
  for (int round = 0; round < kRounds; ++round) {
    keys_[round] = MixSeeds(seed, round);
  }
}

uint64_t Permutation::Encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (uint64_t key : keys_) {
    const uint64_t next = left ^ (Mix(key ^ right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t place) const {
  FSDP_CHECK(place >= 0 && place < size_);
  auto value = static_cast<uint64_t>(place);
  do {
    value = Encrypt(value);
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

}  // namespace llama
