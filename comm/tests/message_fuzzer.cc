// Reads messages of quantised collectives as peers may send them:
//   ./bazelw run --config=fuzz //comm/tests:message_fuzz -- DIR
// Stops the program if the numbers are not those that the message has by
// arithmetic, or if something beside them is written.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "comm/quantized/quantized_communicator.h"

namespace fsdp::comm {
namespace {

constexpr int kRows = 2;
constexpr float kUntouched = 77;

bool Same(float a, float b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

// The messages of two ranks. The input begins with the number of their numbers,
// of the exact ones among them, and of those that share a scale.
class Messages {
 public:
  Messages(const uint8_t* data, size_t size)
      : layout_(data[0], data[1], 1 + data[2], at::kFloat),
        bytes_(at::full({kRows * layout_.bytes()}, 0,
                        at::TensorOptions().dtype(at::kByte))) {
    auto* bytes = static_cast<uint8_t*>(bytes_.mutable_data_ptr());
    // Repeats the input until the messages are full.
    for (int64_t i = 0; size > 3 && i < bytes_.numel(); ++i) {
      bytes[i] = data[3 + i % (size - 3)];
    }
  }

  void Check() const {
    const int64_t numel = layout_.numel();
    const at::Tensor around = Untouched(kRows * numel + 2);
    ReadMessages(layout_, bytes_, around.narrow(0, 1, kRows * numel));
    const auto* read = static_cast<const float*>(around.const_data_ptr()) + 1;
    const at::Tensor sums = Untouched(numel + 2);
    SumMessages(layout_, bytes_, {}, sums.narrow(0, 1, numel));
    const auto* sum = static_cast<const float*>(sums.const_data_ptr()) + 1;
    FSDP_CHECK(read[-1] == kUntouched && read[kRows * numel] == kUntouched);
    FSDP_CHECK(sum[-1] == kUntouched && sum[numel] == kUntouched);
    for (int64_t i = 0; i < numel; ++i) {
      float expected = 0;
      for (int row = 0; row < kRows; ++row) {
        FSDP_CHECK(Same(read[row * numel + i], Number(row, i)));
        expected += Number(row, i);
      }
      FSDP_CHECK(Same(sum[i], expected));
    }
  }

 private:
  static at::Tensor Untouched(int64_t numel) {
    return at::full({numel}, kUntouched);
  }

  // Reads a number at its place in the message: scales, exact numbers, values.
  float Number(int row, int64_t i) const {
    const auto aligned = [](int64_t n) { return (n + 15) / 16 * 16; };
    const int64_t quantized = layout_.quantized();
    const int64_t blocks = (quantized + layout_.block() - 1) / layout_.block();
    const int64_t exact = aligned(4 * blocks);
    const int64_t values = aligned(exact + 4 * layout_.exact());
    const auto* bytes = static_cast<const char*>(bytes_.const_data_ptr()) +
                        row * layout_.bytes();
    float number = 0;
    if (i >= quantized) {
      std::memcpy(&number, bytes + exact + 4 * (i - quantized), 4);
      return number;
    }
    std::memcpy(&number, bytes + 4 * (i / layout_.block()), 4);
    return number * static_cast<float>(static_cast<int8_t>(bytes[values + i]));
  }

  const MessageLayout layout_;
  const at::Tensor bytes_;
};

}  // namespace
}  // namespace fsdp::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size >= 3 && data[0] > 0) fsdp::comm::Messages(data, size).Check();
  return 0;
}
