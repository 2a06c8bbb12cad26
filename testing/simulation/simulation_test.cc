#include "testing/simulation/simulation.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::simulation {
namespace {

using ::testing::ElementsAre;

// Runs bodies as the processes of a simulation.
struct Simulated {
  explicit Simulated(
      const std::vector<std::function<void(Simulation&)>>& bodies,
      uint64_t seed = 0) {
    Simulation::Options options;
    options.seed = seed;
    Simulation simulation(options);
    simulation.Enter();
    std::vector<std::function<void()>> processes;
    processes.reserve(bodies.size());
    for (const auto& body : bodies) {
      processes.emplace_back([&simulation, &body] { body(simulation); });
    }
    simulation.RunProcesses(processes);
    simulation.Leave();
    log_hash = simulation.log_hash();
    took = absl::Nanoseconds(simulation.elapsed_nanos());
  }

  uint64_t log_hash = 0;
  absl::Duration took;
};

TEST(SimulationTest, SleepingTakesSimulatedTimeAlone) {
  const absl::Time before = absl::Now();
  absl::Duration wall;
  std::chrono::steady_clock::duration steady{};
  const Simulated run({[&](Simulation&) {
    const absl::Time begin = absl::Now();
    const auto steady_begin = std::chrono::steady_clock::now();
    absl::SleepFor(absl::Hours(5));
    wall = absl::Now() - begin;
    steady = std::chrono::steady_clock::now() - steady_begin;
  }});
  EXPECT_EQ(wall, absl::Hours(5));
  EXPECT_EQ(steady, std::chrono::hours(5));
  EXPECT_EQ(run.took, absl::Hours(5));
  EXPECT_LT(absl::Now() - before, absl::Minutes(5));
}

TEST(SimulationTest, AJumpOfTheClockEndsWaitsForTheClockAlone) {
  absl::Duration waited;
  const Simulated run({[&](Simulation& simulation) {
    const int64_t begin = simulation.elapsed_nanos();
    simulation.After(absl::Seconds(1),
                     [&simulation] { simulation.JumpClock(absl::Hours(1)); });
    EXPECT_FALSE(simulation.Block([] { return false; },
                                  absl::Now() + absl::Minutes(30)));
    waited = absl::Nanoseconds(simulation.elapsed_nanos() - begin);
  }});
  EXPECT_EQ(waited, absl::Seconds(1));
}

TEST(SimulationTest, MutexesWaitForSimulatedDeadlinesAndForEachOther) {
  absl::Mutex mutex;
  bool ready = false;
  const Simulated run({[&](Simulation&) {
                         absl::MutexLock lock(&mutex);
                         EXPECT_FALSE(mutex.AwaitWithTimeout(
                             absl::Condition(&ready), absl::Minutes(1)));
                         mutex.Await(absl::Condition(&ready));
                       },
                       [&](Simulation&) {
                         absl::SleepFor(absl::Minutes(3));
                         absl::MutexLock lock(&mutex);
                         ready = true;
                       }});
  EXPECT_EQ(run.took, absl::Minutes(3));
}

TEST(SimulationTest, TheOrderIsTheSeedsAlone) {
  const auto order = [](uint64_t seed) {
    std::string text;
    std::vector<std::function<void(Simulation&)>> bodies;
    bodies.reserve(4);
    for (int i = 0; i < 4; ++i) {
      bodies.emplace_back([&text, i](Simulation& simulation) {
        for (int k = 0; k < 5; ++k) {
          simulation.Event("counts");
          absl::StrAppend(&text, i);
        }
      });
    }
    const Simulated run(bodies, seed);
    return absl::StrCat(text, " ", run.log_hash);
  };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST(SimulationTest, TheDeadRunWhenAllOthersHaveEnded) {
  std::vector<std::string> order;
  const Simulated run({[&](Simulation& simulation) {
                         simulation.Kill(0);
                         simulation.Event("goes on");
                         EXPECT_TRUE(simulation.IsDead(0));
                         order.emplace_back("dead");
                       },
                       [&](Simulation& simulation) {
                         simulation.Sleep(absl::Hours(1));
                         order.emplace_back("alive");
                       }});
  EXPECT_THAT(order, ElementsAre("alive", "dead"));
}

TEST(SimulationTest, TheStoppedGoOnLater) {
  absl::Duration ended[2];
  const auto sleep = [&](Simulation& simulation) {
    simulation.Sleep(absl::Seconds(1));
    ended[simulation.process()] = absl::Nanoseconds(simulation.elapsed_nanos());
  };
  const Simulated run({[&](Simulation& simulation) {
                         simulation.Stop(0, absl::Seconds(9));
                         sleep(simulation);
                       },
                       sleep});
  EXPECT_GE(ended[0], absl::Seconds(9));
  EXPECT_EQ(ended[1], absl::Seconds(1));
}

TEST(SimulationTest, TheSlowTakeLongerForTheSame) {
  const auto took = [](int factor) {
    const Simulated run({[factor](Simulation& simulation) {
      simulation.Slow(0, factor);
      for (int i = 0; i < 50; ++i) simulation.Event("counts");
    }});
    return run.took;
  };
  EXPECT_GT(took(1), absl::ZeroDuration());
  EXPECT_EQ(took(10), 10 * took(1));
}

}  // namespace
}  // namespace fsdp::simulation
