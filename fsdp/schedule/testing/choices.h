// Makes the decisions of random tests from a seed or from a fuzzer's bytes.
#ifndef FSDP_SCHEDULE_TESTING_CHOICES_H_
#define FSDP_SCHEDULE_TESTING_CHOICES_H_

#include <cstddef>
#include <cstdint>
#include <random>

namespace fsdp::testing {

class Choices {
 public:
  virtual ~Choices() = default;

  // Returns a number from low to high, both included.
  virtual int Between(int low, int high) = 0;
  bool Chance(int percent) { return Between(1, 100) > 100 - percent; }
};

class SeededChoices final : public Choices {
 public:
  explicit SeededChoices(uint32_t seed) : random_(seed) {}

  int Between(int low, int high) override {
    return std::uniform_int_distribution<int>(low, high)(random_);
  }

 private:
  std::mt19937 random_;
};

// Takes one byte for each choice. When there are no more, every choice is the
// lowest, and no chance comes true.
class ByteChoices final : public Choices {
 public:
  // `data` outlives this object.
  ByteChoices(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  int Between(int low, int high) override {
    return exhausted() ? low : low + data_[next_++] % (high - low + 1);
  }
  bool exhausted() const { return next_ == size_; }

 private:
  const uint8_t* const data_;
  const size_t size_;
  size_t next_ = 0;
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_CHOICES_H_
