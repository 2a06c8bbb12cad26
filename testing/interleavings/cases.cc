// The scenarios that are explored.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/host/shared_host.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

using C = comm::Collective;

constexpr int kAll = Search::kUnbounded;
// With so many elements an all-reduce goes by parts, of which each rank has
// one, and a broadcast has more chunks than are staged ahead.
constexpr int64_t kLarge = (32 << 10) / sizeof(float) + 16;
constexpr int64_t kLong = 3 * comm::SharedRankBlock::kSlotBytes / sizeof(float);
// Two hours are beyond the scenarios' deadlines.
constexpr int64_t kTooLong = int64_t{7200} * 1'000'000'000;

class Cases {
 public:
  explicit Cases(int ranks) : ranks_(ranks) {}

  CheckOptions& Add(std::string name, MakeScenario scenario,
                    int max_preemptions) {
    cases_.push_back({std::move(name), std::move(scenario), {}});
    cases_.back().options.max_preemptions = max_preemptions;
    return cases_.back().options;
  }
  void AddCalls(std::string name, std::vector<Call> calls, int max_preemptions,
                Memory memory = Memory::kPrivate) {
    CollectiveCalls all;
    all.ranks = ranks_;
    all.calls = std::move(calls);
    all.memory = memory;
    Add(std::move(name), Calls(all), max_preemptions);
  }
  int ranks() const { return ranks_; }
  // Allows fewer preemptions where there are three ranks.
  int Bound(int of_two, int of_three) const {
    return ranks_ == 2 ? of_two : of_three;
  }
  std::vector<Case> Take() { return std::move(cases_); }

 private:
  const int ranks_;
  std::vector<Case> cases_;
};

void AddDoorbells(Cases& cases) {
  const int n = cases.ranks();
  cases.Add("doorbell", Doorbells(n, n == 2 ? 2 : 1, false), kAll);
  cases.Add("doorbell, spinning", Doorbells(2, 1, true), kAll);
  cases.Add("doorbell, spurious wake-ups", Doorbells(n, 1, false), kAll)
      .machine.spurious_wakeups = cases.Bound(2, 1);
  CheckOptions& late = cases.Add("doorbell, deadline", DoorbellDeadline(n),
                                 cases.Bound(kAll, 2));
  late.machine.time_jump = kTooLong;
  late.machine.nobody_oversleeps = false;
}

void AddFences(Cases& cases) {
  const int n = cases.ranks();
  cases.Add("fence", Fences(n, 1), cases.Bound(kAll, 1));
  cases.Add("fences", Fences(n, cases.Bound(4, 2)), cases.Bound(1, 0));
  cases
      .Add("fence, a rank is killed", Fences(n, 1, Failures::kExpected),
           cases.Bound(3, 0))
      .machine.mortal_ranks = {1};
  cases
      .Add("fence, too late", Fences(n, 1, Failures::kExpected),
           cases.Bound(1, 0))
      .machine.time_jump = kTooLong;
}

void AddCollectives(Cases& cases) {
  cases.AddCalls("all-gather", {{C::kAllGather}}, cases.Bound(2, 1));
  cases.AddCalls("all-gathers, one slot twice",
                 {{C::kAllGather}, {C::kAllGather}, {C::kAllGather}},
                 cases.Bound(1, 0));
  cases.AddCalls("all-gathers in place", {{C::kAllGather}, {C::kAllGather}},
                 cases.Bound(1, 0), Memory::kSymmetric);
  cases.AddCalls("reduce-scatter", {{C::kReduceScatter}, {C::kReduceScatter}},
                 cases.Bound(1, 0));
  cases.AddCalls("reduce-scatter in place", {{C::kReduceScatter}},
                 cases.Bound(1, 0), Memory::kSymmetric);
  cases.AddCalls("all-to-all", {{C::kAllToAll}}, cases.Bound(1, 0));
  cases.AddCalls("all-reduce", {{C::kAllReduce}}, cases.Bound(1, 0));
  cases.AddCalls("all-reduce by parts", {{C::kAllReduce, kLarge}},
                 cases.Bound(1, 0));
  cases.AddCalls("broadcast of many chunks", {{C::kBroadcast, kLong}}, 0);
  cases.AddCalls("broadcast", {{C::kBroadcast}, {C::kBroadcast}},
                 cases.Bound(1, 0));
}

void AddCalling(Cases& cases) {
  CollectiveCalls calls;
  calls.ranks = cases.ranks();
  calls.calls = {{C::kAllGather}, {C::kReduceScatter}, {C::kAllGather}};
  calls.in_flight_together = true;
  cases.Add("calls in flight together", Calls(calls), 0);
  calls.in_flight_together = false;
  cases.Add("as many all-gathers as there is room for",
            RunAhead(cases.ranks(), C::kAllGather), cases.Bound(1, 0));
  cases.Add("as many broadcasts as there is room for",
            RunAhead(cases.ranks(), C::kBroadcast), cases.Bound(1, 0));
  cases.Add("a rank that leaves instead", LeaveInstead(cases.ranks()),
            cases.Bound(1, 0));
  calls.calls = {{C::kAllGather}};
  calls.leave = true;
  cases.Add("ranks that leave", Calls(calls), cases.Bound(1, 0));
  calls.leave = false;
  calls.memory = Memory::kSymmetric;
  calls.failures = Failures::kExpected;
  cases.Add("calls, a rank is killed", Calls(calls), 0).machine.mortal_ranks = {
      1};
  cases.Add("calls, too late", Calls(calls), 0).machine.time_jump = kTooLong;
  cases.Add("calls that differ", Mismatch(cases.ranks()), cases.Bound(2, 0));
  cases.Add("freed memory", FreedMemory(cases.ranks()), cases.Bound(1, 0));
}

}  // namespace

std::vector<Case> AllCases(int ranks) {
  Cases cases(ranks);
  AddDoorbells(cases);
  AddFences(cases);
  AddCollectives(cases);
  AddCalling(cases);
  if (ranks == 2) {
    cases.Add("abort from another thread", AbortWhileWaiting(), kAll);
  }
  return cases.Take();
}

}  // namespace fsdp::interleavings
