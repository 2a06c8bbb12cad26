// Random orders that take no memory.
#ifndef EXAMPLES_LLAMA_DATA_PERMUTATION_H_
#define EXAMPLES_LLAMA_DATA_PERMUTATION_H_

#include <array>
#include <cstdint>

namespace llama {

// A number that depends on both in no visible way.
uint64_t MixSeeds(uint64_t seed, uint64_t number);

// A permutation of [0, size) that a seed has chosen, and nothing else, on every
// machine: a Feistel network over the next power of four, walked along until it
// is back in the range (J. Black, P. Rogaway: Ciphers with Arbitrary Finite
// Domains, CT-RSA 2002). A place takes less than four steps on average.
// Checkpoints rely on it: another order is a change of format.
class Permutation {
 public:
  // 1 <= size <= 2^62.
  Permutation(int64_t size, uint64_t seed);

  // What is in `place` of [0, size).
  int64_t operator()(int64_t place) const;

 private:
  static constexpr int kRounds = 8;

  uint64_t Encrypt(uint64_t value) const;

  const int64_t size_;
  int half_bits_ = 1;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_PERMUTATION_H_
