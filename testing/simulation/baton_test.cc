#include "testing/simulation/baton.h"

#include <cfenv>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace fsdp::simulation {
namespace {

constexpr int kThreads = 5;
constexpr int kRounds = 100;

thread_local std::string mine;
thread_local int rounds = 0;

class BatonTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !CanSwitchStacks()) GTEST_SKIP() << "not here";
    for (int i = 0; i <= kThreads; ++i) {
      batons_.push_back(GetParam() ? MakeSwitchingBaton() : MakeWakingBaton());
    }
  }

  // The last baton is the test's own.
  Baton& baton(int i) { return *batons_[i]; }
  Baton& after(int i) { return *batons_[(i + 1) % (kThreads + 1)]; }

  std::vector<std::unique_ptr<Baton>> batons_;
};

TEST_P(BatonTest, EachThreadGoesOnWithAllThatItHad) {
  std::string order;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([this, i, &order] {
      baton(i).Await();
      mine = absl::StrCat("thread ", i);
      const auto id = std::this_thread::get_id();
      // This is a state of the processor, not of memory.
      std::fesetround(i % 2 == 0 ? FE_UPWARD : FE_TONEAREST);
      for (int round = 0; round < kRounds; ++round) {
        absl::StrAppend(&order, i);
        ++rounds;
        baton(i).GiveTo(after(i));
        EXPECT_EQ(mine, absl::StrCat("thread ", i));
        EXPECT_EQ(rounds, round + 1);
        EXPECT_EQ(std::this_thread::get_id(), id);
        EXPECT_EQ(std::fegetround(), i % 2 == 0 ? FE_UPWARD : FE_TONEAREST);
      }
      baton(i).GiveForEver(after(i));
    });
  }
  std::string wanted;
  for (int round = 0; round <= kRounds; ++round) {
    baton(kThreads).GiveTo(baton(0));
    if (round < kRounds) absl::StrAppend(&wanted, "01234");
    EXPECT_EQ(order, wanted);
    EXPECT_EQ(mine, "");
    EXPECT_EQ(std::fegetround(), FE_TONEAREST);
  }
  for (int i = 0; i < kThreads; ++i) {
    baton(i).Release();
    threads[i].join();
  }
}

TEST_P(BatonTest, ExceptionsAreThrownAndCaughtInEachThread) {
  std::string text;
  std::thread thread([&] {
    baton(0).Await();
    try {
      throw std::runtime_error("one");
    } catch (const std::runtime_error& error) {
      baton(0).GiveTo(baton(kThreads));
      text = error.what();
    }
    baton(0).GiveForEver(baton(kThreads));
  });
  try {
    throw std::runtime_error("another");
  } catch (const std::runtime_error& error) {
    baton(kThreads).GiveTo(baton(0));
    EXPECT_STREQ(error.what(), "another");
    baton(kThreads).GiveTo(baton(0));
  }
  EXPECT_EQ(text, "one");
  baton(0).Release();
  thread.join();
}

INSTANTIATE_TEST_SUITE_P(All, BatonTest, ::testing::Bool(),
                         [](const ::testing::TestParamInfo<bool>& info) {
                           return info.param ? "Switching" : "Waking";
                         });

}  // namespace
}  // namespace fsdp::simulation
