// Explores runs of replicas that come, go, sleep and are cut off, as a seed
// decides: the real Membership over registers in memory, in one thread and on a
// simulated clock, watched by LogChecker.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/roster_log.h"
#include "replicas/membership/testing/memory_registers.h"
#include "replicas/membership/testing/simulated_rank.h"

namespace fsdp::replicas::testing {
namespace {

struct Exploration {
  // Empty if all is as it should be and the run came to its end in time.
  std::string finding;
  bool had_faults = false;

  // What was seen, so that a test can tell a batch that sees nothing.
  std::map<std::string, int64_t> counts;
};

constexpr absl::Duration kLossTimeout = absl::Seconds(4);
// The run has to come to its end in this time after the last fault.
constexpr absl::Duration kPatience = absl::Seconds(160);
constexpr int kDeepestStall = 3;

class World {
 public:
  explicit World(uint64_t seed);

  Exploration Run();

 private:
  struct Slot {
    SimulatedReplica* now = nullptr;
    // The time at which its launcher notices that a process has ended.
    absl::Time over_at = absl::InfiniteFuture();
    absl::Time restart_at = absl::UnixEpoch();
    bool is_given_up = false;  // nobody starts it again
  };
  // What happens to one rank besides being dead or asleep.
  struct Trouble {
    absl::Time cut_off_until = absl::InfinitePast();
    absl::Duration clock_offset;
  };

  int Random(int n) {
    return static_cast<int>(random_() % static_cast<uint64_t>(n));
  }
  bool OneIn(int n) { return Random(n) == 0; }
  absl::Duration RandomUpTo(absl::Duration most) {
    return most * (Random(1000) / 1000.0);
  }
  bool has_faults() const { return now_ < faults_end_; }

  // Lets a little time pass, and something happen.
  void Tick();
  void Launch(int replica);
  void LookAfter(int replica);
  void Harm();
  void HarmRank(SimulatedRank& rank, Trouble& trouble);
  Fate FateOf(SimulatedRank& rank, const Trouble& trouble);
  void Stall(SimulatedRank& rank);
  // Tells the checker of entries as they are made.
  void Observe();
  bool IsOver() const;
  std::vector<SimulatedRank*> Ranks() const;
  void Count(Exploration& seen) const;
  std::string Text() const;

  std::mt19937_64 random_;
  MembershipOptions options_;
  absl::Time now_ = absl::UnixEpoch();
  absl::Time faults_end_;
  absl::Time keeper_away_until_ = absl::InfinitePast();
  int lost_call_one_in_;
  int stall_one_in_;
  int harm_one_in_;
  int depth_ = 0;

  MemoryRegisters registers_;
  std::multimap<absl::Time, std::function<void()>> later_;
  RosterLog log_;
  LogChecker checker_;
  State saved_;
  std::vector<Slot> slots_;
  // They stay, since their calls may be on the stack.
  std::vector<std::unique_ptr<SimulatedReplica>> replicas_;
  std::map<SimulatedRank*, std::unique_ptr<Trouble>> troubles_;
  int64_t stalls_ = 0;
  int64_t calls_ = 0;
};

MembershipOptions OptionsOf(std::mt19937_64& random) {
  const auto draw = [&](int n) { return static_cast<int>(random() % n); };
  MembershipOptions options;
  options.replicas = 1 + draw(4);
  options.ranks_per_replica = 1 + draw(options.replicas > 2 ? 2 : 3);
  options.steps = 1 + draw(8);
  options.found_timeout = 2 * kLossTimeout;
  options.loss_timeout = kLossTimeout;
  options.step_timeout =
      draw(2) == 0 ? absl::ZeroDuration() : 1.5 * kLossTimeout;
  options.beat_interval = kLossTimeout / 4;
  constexpr int64_t kEntries[] = {2, 3, 5, 64};
  options.log_entries = kEntries[draw(4)];
  return options;
}

World::World(uint64_t seed)
    : random_(seed * 2654435761 + 1),
      options_(OptionsOf(random_)),
      log_(&registers_, options_.log_entries),
      checker_(options_.ranks_per_replica, options_.steps),
      slots_(static_cast<size_t>(options_.replicas)) {
  const bool is_quiet = OneIn(8);
  faults_end_ = now_;
  if (!is_quiet) faults_end_ += RandomUpTo(6 * kLossTimeout);
  lost_call_one_in_ = OneIn(2) ? 1 << 20 : 10 + Random(300);
  stall_one_in_ = 20 + Random(400);
  harm_one_in_ = 20 + Random(400);
  for (Slot& slot : slots_) {
    slot.restart_at =
        now_ + RandomUpTo(is_quiet ? kLossTimeout : 3 * kLossTimeout);
  }
}

Exploration World::Run() {
  Exploration seen;
  seen.had_faults = has_faults();
  const absl::Time end = faults_end_ + kPatience;
  while (checker_.finding().empty() && !IsOver()) {
    if (now_ > end) checker_.Complain(absl::StrCat("no end:", Text()));
    Tick();
  }
  Count(seen);
  if (!seen.had_faults && seen.counts["lost"] > 0) {
    checker_.Complain("members were lost without a fault");
  }
  if (!checker_.finding().empty()) {
    seen.finding = absl::StrCat(checker_.finding(), "; log:");
    for (const Roster& entry : checker_.log()) {
      absl::StrAppend(&seen.finding, "\n  ", Describe(entry));
    }
  }
  return seen;
}

void World::Count(Exploration& seen) const {
  for (const Roster& entry : checker_.log()) {
    ++seen.counts["entries"];
    seen.counts["lost"] += entry.cause == Cause::kLost;
    if (entry.cause == Cause::kFounded) {
      seen.counts["founded anew"] += entry.number > 0;
      continue;
    }
    for (const Member& member : entry.members) {
      seen.counts["joined"] += member.is_new;
    }
  }
  for (const auto& replica : replicas_) {
    for (const auto& rank : replica->ranks) {
      seen.counts["ranks that learned that they are lost"] +=
          rank->was_evicted();
    }
  }
  seen.counts["without faults"] = !seen.had_faults;
  seen.counts["stalls within a call"] = stalls_;
  seen.counts["calls to the registers"] = calls_;
}

std::vector<SimulatedRank*> World::Ranks() const {
  std::vector<SimulatedRank*> ranks;
  for (const Slot& slot : slots_) {
    if (slot.now == nullptr) continue;
    for (const auto& rank : slot.now->ranks) ranks.push_back(rank.get());
  }
  return ranks;
}

bool World::IsOver() const {
  if (!checker_.has_ended()) return false;
  for (const Slot& slot : slots_) {
    if (slot.is_given_up) continue;
    if (slot.now == nullptr) return false;
    for (const auto& rank : slot.now->ranks) {
      if (!rank->is_done()) return false;
    }
  }
  return true;
}

std::string World::Text() const {
  std::string text;
  for (const SimulatedRank* rank : Ranks()) {
    absl::StrAppend(&text, "\n  ", rank->Text(), rank->is_dead ? " dead" : "");
  }
  return text;
}

void World::Tick() {
  const int ranks = options_.replicas * options_.ranks_per_replica;
  now_ += RandomUpTo(absl::Milliseconds(200) / ranks);
  while (!later_.empty() && (later_.begin()->first <= now_ || !has_faults())) {
    const std::function<void()> call = later_.begin()->second;
    later_.erase(later_.begin());
    call();
  }
  for (int replica = 0; replica < options_.replicas; ++replica) {
    LookAfter(replica);
  }
  if (has_faults() && OneIn(harm_one_in_)) Harm();
  std::vector<SimulatedRank*> ready;
  for (SimulatedRank* rank : Ranks()) {
    if (!has_faults()) rank->asleep_until = absl::InfinitePast();
    if (rank->is_dead || rank->is_done() || rank->is_acting ||
        rank->asleep_until > now_) {
      continue;
    }
    ready.push_back(rank);
  }
  if (ready.empty()) return;
  SimulatedRank& rank = *ready[Random(static_cast<int>(ready.size()))];
  rank.is_acting = true;
  rank.Act();
  rank.is_acting = false;
}

void World::LookAfter(int replica) {
  Slot& slot = slots_[static_cast<size_t>(replica)];
  if (slot.is_given_up) return;
  if (slot.now == nullptr) {
    if (now_ >= slot.restart_at ||
        (!has_faults() && !replicas_.empty() && checker_.has_ended())) {
      Launch(replica);
    }
    return;
  }
  bool is_over = slot.now->is_over;
  for (const auto& rank : slot.now->ranks) is_over |= rank->is_dead;
  if (is_over && slot.over_at == absl::InfiniteFuture()) {
    slot.over_at = now_ + RandomUpTo(kLossTimeout);
  }
  if (now_ < slot.over_at) return;
  for (const auto& rank : slot.now->ranks) rank->is_dead = true;
  // The others have to find out by themselves.
  slot.is_given_up = replica > 0 && OneIn(3);
  if (!slot.is_given_up && OneIn(2)) {
    TellGone(registers_, slot.now->id).IgnoreError();
  }
  slot.now = nullptr;
  slot.over_at = absl::InfiniteFuture();
  slot.restart_at =
      now_ + RandomUpTo(OneIn(3) ? 3 * kLossTimeout : absl::Milliseconds(100));
}

void World::Launch(int replica) {
  Slot& slot = slots_[static_cast<size_t>(replica)];
  auto launched = std::make_unique<SimulatedReplica>();
  launched->id.replica = replica;
  for (const auto& earlier : replicas_) {
    launched->id.incarnation += earlier->id.replica == replica;
  }
  slot.now = launched.get();
  State begin = saved_;
  if (begin.step == 0) begin.content = static_cast<uint64_t>(replica) + 1;
  for (int number = 0; number < options_.ranks_per_replica; ++number) {
    auto trouble = std::make_unique<Trouble>();
    Trouble* const its = trouble.get();
    if (!OneIn(2)) its->clock_offset = RandomUpTo(absl::Hours(100));
    MembershipOptions options = options_;
    options.self = launched->id;
    options.rank = number;
    options.now = [this, its] { return now_ + its->clock_offset; };
    // The rank is known only once it has been made.
    const auto self = std::make_shared<SimulatedRank*>(nullptr);
    auto registers = std::make_unique<FaultyRegisters>(
        &registers_, FaultyRegisters::Hooks{
                         [this, self, its] { return FateOf(**self, *its); },
                         [this](const std::function<void()>& call) {
                           later_.emplace(now_ + RandomUpTo(2 * kLossTimeout),
                                          call);
                         },
                         [this] { Observe(); }});
    RankSurroundings surroundings;
    surroundings.checker = &checker_;
    surroundings.random = [this](int n) { return Random(n); };
    surroundings.save = [this](const State& state) {
      if (state.step % 3 == 0) saved_ = state;
    };
    surroundings.peer = [this, number](const ReplicaId& id) -> SimulatedRank* {
      for (const Slot& other : slots_) {
        if (other.now == nullptr || other.now->id != id) continue;
        SimulatedRank* const peer = other.now->ranks[number].get();
        return peer->is_dead || peer->asleep_until > now_ ? nullptr : peer;
      }
      return nullptr;
    };
    launched->ranks.push_back(std::make_unique<SimulatedRank>(
        options, std::move(registers), launched.get(), begin, surroundings));
    *self = launched->ranks.back().get();
    troubles_[*self] = std::move(trouble);
  }
  replicas_.push_back(std::move(launched));
}

void World::Harm() {
  const std::vector<SimulatedRank*> ranks = Ranks();
  if (ranks.empty()) return;
  if (OneIn(8)) {
    keeper_away_until_ = now_ + RandomUpTo(2 * kLossTimeout);
    return;
  }
  SimulatedRank& rank = *ranks[Random(static_cast<int>(ranks.size()))];
  HarmRank(rank, *troubles_.at(&rank));
}

void World::HarmRank(SimulatedRank& rank, Trouble& trouble) {
  const absl::Duration time = RandomUpTo(3 * kLossTimeout);
  switch (Random(5)) {
    case 0:
    case 1:
      rank.is_dead = true;
      return;
    case 2:
      rank.asleep_until = now_ + time;
      return;
    case 3:
      trouble.cut_off_until = now_ + time;
      return;
    default:
      trouble.clock_offset += OneIn(2) ? time : -time;
  }
}

Fate World::FateOf(SimulatedRank& rank, const Trouble& trouble) {
  ++calls_;
  if (depth_ < kDeepestStall && OneIn(stall_one_in_)) Stall(rank);
  if (rank.is_dead) return Fate::kLost;
  if (!has_faults()) return Fate::kDone;
  if (now_ < keeper_away_until_ || now_ < trouble.cut_off_until) {
    return Fate::kLost;
  }
  if (!OneIn(lost_call_one_in_)) return Fate::kDone;
  constexpr Fate kFates[] = {Fate::kLost, Fate::kNoReply, Fate::kDelayed};
  return kFates[Random(3)];
}

void World::Stall(SimulatedRank& rank) {
  ++depth_;
  ++stalls_;
  int ticks = Random(5);
  if (has_faults() && OneIn(6)) ticks = Random(400);
  for (; ticks > 0 && checker_.finding().empty(); --ticks) Tick();
  while (rank.asleep_until > now_ && checker_.finding().empty()) Tick();
  --depth_;
}

void World::Observe() {
  while (checker_.finding().empty()) {
    const auto number = static_cast<int64_t>(checker_.log().size());
    const absl::StatusOr<std::optional<Roster>> entry = log_.Entry(number);
    if (!entry.ok()) {
      checker_.Complain(absl::StrCat("log: ", entry.status().ToString()));
    } else if (!entry->has_value()) {
      break;
    } else {
      checker_.Made(**entry);
    }
  }
  // A number has one roster.
  if (!checker_.log().empty()) {
    const auto last = log_.Entry(checker_.log().back().number);
    if (last.ok() && last->has_value()) checker_.Saw(**last);
  }
}

Exploration Explore(uint64_t seed) {
  // One thread holds the locks of processes that wait for it in any order.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return World(seed).Run();
}

constexpr uint64_t kSeeds = 3000;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// --test_env=FIRST_SEED=N and --test_env=SEEDS=N explore others.
TEST(ExplorerTest, RunsKeepWhatIsPromisedAndEnd) {
  const uint64_t first = FromEnvironment("FIRST_SEED", 0);
  const uint64_t seeds = FromEnvironment("SEEDS", kSeeds);
  std::map<std::string, int64_t> sums;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const Exploration seen = Explore(seed);
    ASSERT_EQ(seen.finding, "") << "seed " << seed;
    for (const auto& [what, count] : seen.counts) sums[what] += count;
  }
  for (const auto& [what, count] : sums) {
    std::cout << what << ": " << count << "\n";
    if (seeds >= kSeeds) EXPECT_GT(count, 0) << what;
  }
}

TEST(ExplorerTest, TheSameSeedIsTheSameRun) {
  const Exploration first = Explore(7);
  const Exploration second = Explore(7);
  EXPECT_EQ(first.counts, second.counts);
}

}  // namespace
}  // namespace fsdp::replicas::testing
