#include "testing/interleavings/machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"

namespace fsdp::interleavings {

namespace {

// No scenario takes so many steps: a longer execution never ends.
constexpr int64_t kMaxSteps = 20'000;

// The clock begins in 2001, so that nothing wraps.
constexpr int64_t kBegin = 1'000'000'000'000'000'000;

bool LooksAgain(const TraceLine& a, const TraceLine& b) {
  return a.thread == b.thread && a.what == b.what && a.offset == b.offset &&
         a.value == b.value && a.site == b.site;
}

}  // namespace

// A thread of a model: it has a stack of its own, and switches to others where
// it says so. Runs one function after another; one system thread makes all its
// switches.
class Fiber {
 public:
  // `at_end` runs on the fiber whenever a function has ended, and switches
  // away.
  explicit Fiber(std::function<void()> at_end)
      : stack_(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
        at_end_(std::move(at_end)) {
    FSDP_CHECK(stack_ != MAP_FAILED);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() { munmap(stack_, kStackBytes); }

  // Sets what the next switch to this fiber begins; the last one has ended.
  void Start(std::function<void()> function) {
    function_ = std::move(function);
  }
  // Runs on the caller's own stack until somebody switches back there.
  static void Switch(jmp_buf* from, Fiber* to) {
    if (setjmp(*from) == 0) to->Resume();
  }
  static void Switch(Fiber* from, Fiber* to) { Switch(&from->state_, to); }
  static void Switch(Fiber* from, jmp_buf* to) {
    if (setjmp(from->state_) == 0) longjmp(*to, 1);
  }

 private:
  static constexpr size_t kStackBytes = 1 << 20;

  // makecontext() passes integers only: two of them are the pointer.
  static void Enter(unsigned low, unsigned high) {
    const uintptr_t self = uintptr_t{high} << 32 | uintptr_t{low};
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    reinterpret_cast<Fiber*>(self)->Loop();
  }

  void Loop() {
    while (true) {
      // The function is destroyed before somebody starts another one.
      std::exchange(function_, nullptr)();
      at_end_();
    }
  }

  // Uses a context, which costs system calls, for the first switch only.
  void Resume() {
    if (has_begun_) longjmp(state_, 1);
    has_begun_ = true;
    FSDP_CHECK(getcontext(&context_) == 0);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
                static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
    setcontext(&context_);
  }

  void* const stack_;
  ucontext_t context_;
  jmp_buf state_;
  bool has_begun_ = false;
  const std::function<void()> at_end_;
  std::function<void()> function_;
};

__thread Machine* Machine::current_ = nullptr;

Machine::Machine(MachineOptions options, const Mutation* mutation)
    : options_(std::move(options)), mutation_(mutation), threads_(kMaxThreads) {
  // One thread of the system holds what several threads here have locked.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  for (Thread& thread : threads_) {
    thread.fiber = std::make_unique<Fiber>([this] { EndOfThread(); });
  }
  FSDP_CHECK(current_ == nullptr);
  current_ = this;
  Reset();
}

Machine::~Machine() { current_ = nullptr; }

void Machine::Reset() {
  arena_.Reset();
  memory_ = WeakMemory();
  mutexes_.clear();
  num_threads_ = 0;
  std::fill(std::begin(is_dead_), std::end(is_dead_), false);
  any_dead_ = false;
  time_has_jumped_ = false;
  has_completed_ = false;
  now_ = kBegin;
  spurious_left_ = options_.spurious_wakeups;
  num_steps_ = 0;
  violation_.clear();
  trace_.clear();
}

void Machine::AddThread(int rank, std::function<void()> body) {
  const int environment = static_cast<int>(options_.mortal_ranks.size()) + 1;
  FSDP_CHECK(num_threads_ + environment < kMaxThreads);
  Thread& thread = threads_[num_threads_++];
  thread.fiber->Start(std::move(body));
  thread.rank = rank;
  thread.state = State::kReady;
  thread.next = Footprint();
  thread.ticks = 0;
  thread.depth = 0;
}

void Machine::Run(Search& search) {
  search_ = &search;
  mode_ = Mode::kExplore;
  memory_.Synchronize();
  // Each thread runs up to its first operation.
  is_launching_ = true;
  for (int i = 0; i < num_threads(); ++i) SwitchTo(i);
  is_launching_ = false;
  Reschedule();
  Drain();
  mode_ = Mode::kDirect;
}

void Machine::Drain() {
  mode_ = Mode::kDrain;
  bool any = true;
  while (any) {
    any = false;
    for (int i = 0; i < num_threads(); ++i) {
      if (threads_[i].state == State::kDone) continue;
      any = true;
      SwitchTo(i);
    }
  }
}

void Machine::EndOfThread() {
  self().state = State::kDone;
  if (mode_ == Mode::kExplore && !is_launching_) {
    Reschedule();
  } else {
    GoToMain();
  }
}

void Machine::SwitchTo(int thread) {
  const int from = std::exchange(self_, thread);
  if (from == thread) return;
  if (from < 0) {
    Fiber::Switch(&main_, threads_[thread].fiber.get());
  } else {
    Fiber::Switch(threads_[from].fiber.get(), threads_[thread].fiber.get());
  }
}

void Machine::GoToMain() {
  const int from = std::exchange(self_, -1);
  if (from >= 0) Fiber::Switch(threads_[from].fiber.get(), &main_);
}

bool Machine::IsEnabled(int thread) const {
  const Thread& t = threads_[thread];
  if (is_dead_[t.rank]) return false;
  if (t.state != State::kLocking) return t.state == State::kReady;
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  const auto mutex = mutexes_.find(reinterpret_cast<void*>(t.awaited));
  return mutex == mutexes_.end() || mutex->second.holder < 0;
}

bool Machine::AllDone() const {
  for (int i = 0; i < num_threads(); ++i) {
    const Thread& thread = threads_[i];
    if (thread.state != State::kDone && !is_dead_[thread.rank]) return false;
  }
  return true;
}

// Candidates are threads, then one to kill each mortal rank, then one for a
// jump of time.
Candidates Machine::PendingSteps() const {
  Candidates candidates;
  for (int i = 0; i < num_threads(); ++i) {
    if (threads_[i].state == State::kDone) continue;
    candidates[i].is_pending = true;
    candidates[i].is_enabled = IsEnabled(i);
    candidates[i].next = threads_[i].next;
  }
  int place = num_threads();
  const bool all_done = AllDone();
  for (int rank : options_.mortal_ranks) {
    Candidate& killer = candidates[place++];
    killer.is_environment = true;
    killer.is_pending = !any_dead_;
    for (int i = 0; i < num_threads() && !any_dead_; ++i) {
      const Thread& thread = threads_[i];
      if (thread.rank == rank && thread.state != State::kDone && !all_done) {
        killer.is_enabled = true;
      }
    }
    killer.next.Add(LifeOf(rank), true);
    killer.next.Add(kKilling, true);
  }
  if (options_.time_jump > 0) {
    Candidate& clock = candidates[place];
    clock.is_environment = true;
    clock.is_pending = !time_has_jumped_;
    clock.is_enabled = !time_has_jumped_ && !all_done;
    clock.next.Add(kClock, true);
  }
  return candidates;
}

// Hands on to the thread that the search wants next, maybe the caller.
void Machine::Reschedule() {
  if (is_launching_) return GoToMain();
  while (true) {
    const Candidates candidates = PendingSteps();
    const bool any =
        std::any_of(candidates.begin(), candidates.end(),
                    [](const Candidate& c) { return c.is_enabled; });
    has_completed_ = AllDone();
    if (has_completed_ || (!any && !LetTimePass())) {
      mode_ = Mode::kDrain;
      return GoToMain();
    }
    if (!any) continue;
    const std::optional<int> chosen = search_->ChooseThread(candidates);
    if (!chosen) {
      mode_ = Mode::kDrain;
      return GoToMain();
    }
    if (*chosen < num_threads()) return SwitchTo(*chosen);
    ActAsEnvironment(*chosen - num_threads());
  }
}

void Machine::ActAsEnvironment(int index) {
  const auto& mortal = options_.mortal_ranks;
  if (index < static_cast<int>(mortal.size())) {
    is_dead_[mortal[index]] = true;
    any_dead_ = true;
    trace_.push_back({-1, mortal[index], "a rank is killed", false});
    return;
  }
  time_has_jumped_ = true;
  now_ += options_.time_jump;
  trace_.push_back({-1, 0, "time jumps", false});
  WakeSleepers();
}

// Moves the time to where the first sleep ends, since nobody can go on. Returns
// false if no sleep ends.
bool Machine::LetTimePass() {
  int64_t next = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < num_threads(); ++i) {
    const Thread& thread = threads_[i];
    if (thread.state == State::kAsleep && !is_dead_[thread.rank]) {
      next = std::min(next, thread.wake_time);
    }
  }
  if (next == std::numeric_limits<int64_t>::max()) {
    Violate("a deadlock: nobody can go on");
    return false;
  }
  if (options_.nobody_oversleeps && !any_dead_ && !time_has_jumped_) {
    Violate("a wake-up is lost: all sleep until their time is over");
    return false;
  }
  now_ = std::max(now_, next);
  memory_.Settle();
  search_->Synchronize();
  trace_.push_back({-1, 0, "time passes", false});
  WakeSleepers();
  return true;
}

// Wakes those whose sleep is over.
void Machine::WakeSleepers() {
  for (int i = 0; i < num_threads(); ++i) {
    Thread& thread = threads_[i];
    if (thread.state == State::kAsleep && thread.wake_time <= now_) {
      thread.state = State::kReady;
    }
  }
}

Footprint Machine::FootprintOf(uint64_t place, bool writes) const {
  Footprint footprint;
  footprint.Add(place, writes);
  const int rank = threads_[self_].rank;
  const auto& mortal = options_.mortal_ranks;
  if (std::find(mortal.begin(), mortal.end(), rank) != mortal.end()) {
    footprint.Add(LifeOf(rank), false);
  }
  return footprint;
}

bool Machine::Step(const Footprint& footprint) {
  self().next = footprint;
  if (++num_steps_ > kMaxSteps) Violate("an execution that does not end");
  if (mode_ == Mode::kExplore) Reschedule();
  return mode_ == Mode::kExplore;
}

void Machine::Violate(std::string what) {
  if (mode_ == Mode::kDrain || !violation_.empty()) return;
  violation_ = std::move(what);
  if (mode_ == Mode::kExplore) mode_ = Mode::kDrain;
}

std::string Machine::DescribeTrace() const {
  std::string text;
  const TraceLine* previous = nullptr;
  for (const TraceLine& line : trace_) {
    if (previous != nullptr && LooksAgain(*previous, line)) continue;
    previous = &line;
    absl::StrAppend(&text, "  ");
    if (line.thread >= 0) {
      absl::StrAppend(&text, "thread ", line.thread, " (rank ", line.rank,
                      ") ");
    }
    absl::StrAppend(&text, line.what);
    if (line.in_arena) {
      absl::StrAppend(&text, " ", arena_.FullNameOf(line.offset), ": ",
                      line.value, line.is_old ? ", not the newest" : "");
    }
    if (line.site != 0) {
      absl::StrAppend(&text, "  [", FunctionAt(line.site), "]");
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

int Machine::current_rank() const {
  return self_ >= 0 ? threads_[self_].rank : rank_of_caller_;
}

}  // namespace fsdp::interleavings
