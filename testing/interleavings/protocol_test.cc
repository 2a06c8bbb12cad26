#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/interleavings/checker.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

TEST(ProtocolTest, Doorbell) {
  for (int turns : {1, 2}) {
    const CheckResult r = Explore(Doorbells(2, turns, false), {});
    std::cout << turns << ": " << r << "\n";
  }
  const CheckResult r = Explore(Doorbells(2, 1, true), {});
  std::cout << "spin: " << r << "\n";
  const CheckResult r3 = Explore(Doorbells(3, 1, false), {});
  std::cout << "3: " << r3 << "\n";
}
TEST(ProtocolTest, Fence) {
  CheckOptions o;
  o.max_executions = 300000;
  for (int turns : {1, 2}) {
    const CheckResult r = Explore(Fences(2, turns), o);
    std::cout << turns << ": " << r << "\n";
  }
  o.max_preemptions = 2;
  std::cout << "3: " << Explore(Fences(3, 1), o) << "\n";
}
TEST(ProtocolTest, AllGather) {
  CheckOptions o;
  o.max_executions = 100000;
  CollectiveCalls c;
  c.calls = {Collectives::kAllGather};
  for (int p : {0, 1, 2, 3, -1}) {
    o.max_preemptions = p;
    std::cout << p << ": " << Explore(Calls(c), o) << "\n";
  }
}

}  // namespace
}  // namespace fsdp::interleavings
