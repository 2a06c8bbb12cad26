#include "base/parallel_for.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp {
namespace {

TEST(ParallelForTest, HasEveryNumberOnce) {
  // ThreadSanitizer, which does not see how these threads meet, has only one.
  const int threads = at::get_num_threads();
  if (threads > 1) at::set_num_threads(3);
  for (const int64_t count : {0, 1, 2, 7, 1021}) {
    for (const int64_t grain : {0, 1, 5, 1021}) {
      std::vector<std::atomic<int>> times(count);
      std::atomic<int> ranges = 0;
      ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
        ++ranges;
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++times[i];
        if (end - begin == count) return;
        ParallelFor(end - begin, 1, [&](int64_t first, int64_t last) {
          EXPECT_EQ(last - first, end - begin);
        });
      });
      for (const std::atomic<int>& of_one : times) EXPECT_EQ(of_one, 1);
      if (at::get_num_threads() > 1 && grain < count && count > 2) {
        EXPECT_GT(ranges, 1);
      }
    }
  }
  const auto fail = [](int64_t, int64_t) { throw std::runtime_error("no"); };
  EXPECT_THROW(ParallelFor(5, 1, fail), std::runtime_error);
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace fsdp
