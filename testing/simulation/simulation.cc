#include "testing/simulation/simulation.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/check.h"

namespace fsdp::simulation {
namespace {

// It is far from now: who compares it with a real time waits for ever.
constexpr int64_t kWallStart = int64_t{4'102'444'800} * 1'000'000'000;  // 2100
constexpr int64_t kSteadyStart = 1'000'000'000'000;
constexpr int64_t kNever = -1;

// With more events a simulation counts as one that never ends.
constexpr int64_t kMostEvents = 2'000'000;

// The task that this thread is, for its system calls.
thread_local Task* current_task = nullptr;

void AwaitBaton(Task& task) {
  while (sem_wait(&task.baton) != 0) FSDP_CHECK(errno == EINTR);
}

// Returns when the baton is back.
void GiveBaton(Task& from, Task& to) {
  sem_post(&to.baton);
  AwaitBaton(from);
}

}  // namespace

struct Simulation::Process {
  int64_t events = 0;
  bool dead = false;
  int64_t stopped_until = 0;
  int slow = 1;
};

struct Simulation::Timer {
  int64_t at;
  int64_t number;
  std::function<void()> action;

  bool operator<(const Timer& other) const {  // the earliest is the largest
    return std::make_pair(at, number) > std::make_pair(other.at, other.number);
  }
};

Simulation::Simulation(const Options& options)
    : options_(options), random_(options.seed) {}

Simulation::~Simulation() { FSDP_CHECK(tasks_.empty()); }

Simulation* Simulation::Current() {
  return current_task == nullptr ? nullptr : current_task->simulation;
}

void Simulation::Enter() {
  FSDP_CHECK(current_task == nullptr);
  Task* const task = StartTask(kDriver);
  current_task = task;
  // If they differ, this version of Abseil tells the time in another way.
  FSDP_CHECK(absl::Now() == Now());
}

void Simulation::Leave() {
  FSDP_CHECK(current_task != nullptr && tasks_.size() == 1);
  current_task = nullptr;
  tasks_.clear();
}

void Simulation::RunProcesses(
    const std::vector<std::function<void()>>& bodies) {
  std::vector<std::thread> threads;
  threads.reserve(bodies.size());
  for (size_t i = 0; i < bodies.size(); ++i) {
    spawning_ = static_cast<int>(i);
    ProcessOf(spawning_) = Process();
    threads.emplace_back(bodies[i]);
    spawning_ = kDriver - 1;
  }
  Block([this] { return AllEnded(false); }, absl::InfiniteFuture());
  ghosts_run_ = true;
  Block([this] { return AllEnded(true); }, absl::InfiniteFuture());
  for (std::thread& thread : threads) thread.join();
  ghosts_run_ = false;
  timers_.clear();
}

bool Simulation::AllEnded(bool the_dead_too) const {
  return std::all_of(tasks_.begin(), tasks_.end(), [&](const auto& task) {
    if (task->process == kDriver || task->state == Task::State::kEnded) {
      return true;
    }
    return !the_dead_too && ProcessOf(task->process).dead;
  });
}

// --- Time and chance ---------------------------------------------------------

int64_t Simulation::wall_nanos() const { return kWallStart + now_ + jumped_; }
int64_t Simulation::steady_nanos() const { return kSteadyStart + now_; }

absl::Time Simulation::Now() const { return absl::FromUnixNanos(wall_nanos()); }

int64_t Simulation::SteadyTimeOf(absl::Time deadline) const {
  if (deadline == absl::InfiniteFuture()) return kNever;
  if (deadline <= Now()) return now_;
  const absl::Duration left = deadline - Now();
  if (left > absl::Hours(1'000'000)) return kNever;
  return now_ + absl::ToInt64Nanoseconds(left);
}

uint64_t Simulation::Random(uint64_t bound) { return random_() % bound; }

absl::Duration Simulation::RandomDelay(absl::Duration most) {
  const auto nanos = static_cast<uint64_t>(absl::ToInt64Nanoseconds(most));
  switch (Random(8)) {
    case 0:
      return absl::ZeroDuration();
    case 1:
      return absl::Nanoseconds(Random(nanos + 1));
    default:
      return absl::Nanoseconds(Random(nanos / 50 + 1));
  }
}

void Simulation::After(absl::Duration delay, std::function<void()> action) {
  timers_.push_back({now_ + absl::ToInt64Nanoseconds(delay), next_timer_++,
                     std::move(action)});
  std::push_heap(timers_.begin(), timers_.end());
}

// --- Tasks -------------------------------------------------------------------

int Simulation::process() const {
  FSDP_CHECK(current_task != nullptr);
  return current_task->process;
}

int Simulation::process_of_new_threads() const {
  return spawning_ >= kDriver ? spawning_ : process();
}

Simulation::Process& Simulation::ProcessOf(int process) const {
  auto& processes = const_cast<Simulation*>(this)->processes_;
  const auto index = static_cast<size_t>(process - kDriver);
  while (processes.size() <= index) {
    processes.push_back(std::make_unique<Process>());
  }
  return *processes[index];
}

Task* Simulation::StartTask(int process) {
  tasks_.push_back(std::make_unique<Task>(this, next_task_++, process));
  Task& task = *tasks_.back();
  task.runs_at = now_;
  task.tie = random_();
  return &task;
}

void Simulation::BeginTask(Task* task) {
  current_task = task;
  AwaitBaton(*task);
}

void Simulation::EndTask(Task* task) {
  task->state = Task::State::kEnded;
  task->identity = nullptr;
  Task* const next = Next();
  current_task = nullptr;
  // The thread goes on when it is joined: what its end does is done alone.
  GiveBaton(*task, *next);
}

void Simulation::AwaitTask(Task* task) {
  Block([task] { return task->state == Task::State::kEnded; },
        absl::InfiniteFuture());
  sem_post(&task->baton);
}

Task* Simulation::FindTask(uint64_t thread) {
  for (const auto& task : tasks_) {
    if (task->process != kDriver || task->id != 0) {
      if (task->thread == thread) return task.get();
    }
  }
  return nullptr;
}

void Simulation::RemoveTask(Task* task) {
  tasks_.erase(
      std::find_if(tasks_.begin(), tasks_.end(),
                   [task](const auto& other) { return other.get() == task; }));
}

bool Simulation::AwaitPost(const void* identity, absl::Time deadline) {
  Task& me = *current_task;
  me.identity = identity;
  const std::function<bool()> posted = [&me] { return me.posts > 0; };
  if (!Block(posted, deadline)) return false;
  --me.posts;
  return true;
}

bool Simulation::Post(const void* identity) {
  for (const auto& task : tasks_) {
    if (task->identity != identity) continue;
    ++task->posts;
    return true;
  }
  return false;
}

// --- Who runs ----------------------------------------------------------------

int64_t Simulation::TimeOf(Task& task) {
  const Process& process = ProcessOf(task.process);
  if (process.dead && !ghosts_run_) return kNever;
  if (task.state == Task::State::kBlocked && (*task.ready)()) {
    task.state = Task::State::kReady;
    task.timed_out = false;
    task.runs_at = now_;
    task.tie = random_();
  }
  if (task.state == Task::State::kEnded) return kNever;
  int64_t at = task.runs_at;
  if (task.state == Task::State::kBlocked) {
    at = SteadyTimeOf(task.deadline);
    if (at == kNever) return kNever;
  }
  return process.dead ? std::max(at, now_)
                      : std::max({at, now_, process.stopped_until});
}

Task* Simulation::Next() {
  for (;;) {
    Task* next = nullptr;
    int64_t earliest = std::numeric_limits<int64_t>::max();
    for (const auto& task : tasks_) {
      const int64_t at = TimeOf(*task);
      if (at == kNever || at > earliest) continue;
      if (at == earliest && next != nullptr && task->tie > next->tie) continue;
      earliest = at;
      next = task.get();
    }
    if (!timers_.empty() && timers_.front().at <= earliest) {
      std::pop_heap(timers_.begin(), timers_.end());
      const Timer timer = std::move(timers_.back());
      timers_.pop_back();
      now_ = std::max(now_, timer.at);
      timer.action();
      continue;
    }
    if (next == nullptr) Hang("nobody can run any more");
    now_ = earliest;
    if (next->state == Task::State::kBlocked) {
      next->state = Task::State::kReady;
      next->timed_out = true;
    }
    return next;
  }
}

void Simulation::Switch() {
  Task* const next = Next();
  if (next != current_task) GiveBaton(*current_task, *next);
}

bool Simulation::Block(const std::function<bool()>& ready,
                       absl::Time deadline) {
  Task& me = *current_task;
  me.ready = &ready;
  me.deadline = deadline;
  me.timed_out = false;
  me.state = Task::State::kBlocked;
  Switch();
  me.ready = nullptr;
  return !me.timed_out;
}

void Simulation::Sleep(absl::Duration duration) {
  Task& me = *current_task;
  me.runs_at = now_ + absl::ToInt64Nanoseconds(duration);
  me.tie = random_();
  Switch();
}

void Simulation::Event(absl::string_view text) {
  Log(text);
  if (++events_ > kMostEvents) Hang("it does not end");
  Process& mine = ProcessOf(process());
  if (mine.dead && ghosts_run_) return;
  if (on_event_ && process() != kDriver) on_event_(process(), mine.events);
  ++mine.events;
  Sleep(RandomDelay(absl::Microseconds(500)) * mine.slow);
}

// --- What happens to processes -----------------------------------------------

void Simulation::Kill(int process) {
  Log(absl::StrCat("process ", process, " is killed"));
  ProcessOf(process).dead = true;
}

bool Simulation::IsDead(int process) const { return ProcessOf(process).dead; }

void Simulation::Stop(int process, absl::Duration duration) {
  Log(absl::StrCat("process ", process, " is stopped for ",
                   absl::FormatDuration(duration)));
  Process& stopped = ProcessOf(process);
  stopped.stopped_until = std::max(stopped.stopped_until,
                                   now_ + absl::ToInt64Nanoseconds(duration));
}

void Simulation::Slow(int process, int factor) {
  Log(absl::StrCat("process ", process, " is ", factor, " times slower"));
  ProcessOf(process).slow = factor;
}

void Simulation::JumpClock(absl::Duration by) {
  Log(absl::StrCat("the clock jumps by ", absl::FormatDuration(by)));
  jumped_ += absl::ToInt64Nanoseconds(by);
}

void Simulation::Violation(absl::string_view text) {
  Log(absl::StrCat("VIOLATION: ", text));
  if (violation_.empty()) violation_ = std::string(text);
}

// --- The log -----------------------------------------------------------------

void Simulation::Log(absl::string_view text) {
  const int who = current_task == nullptr ? kDriver : current_task->process;
  log_hash_ = Fnv1a(absl::StrCat(now_, " ", who, " ", text), log_hash_);
  if (!options_.keep_log) return;
  log_.push_back(absl::StrFormat(
      "%12.6f ms  %s  %s", static_cast<double>(now_) / 1e6,
      who == kDriver ? std::string("   ") : absl::StrCat("r", who, " "), text));
}

// Tasks that wait cannot be told to stop, so that nothing can go on.
void Simulation::Hang(absl::string_view why) const {
  std::fprintf(stderr, "the simulation of seed %llu hangs: %s\n",
               static_cast<unsigned long long>(options_.seed),
               std::string(why).c_str());
  const size_t first = log_.size() > 100 ? log_.size() - 100 : 0;
  for (size_t i = first; i < log_.size(); ++i) {
    std::fprintf(stderr, "%s\n", log_[i].c_str());
  }
  for (const auto& task : tasks_) {
    std::fprintf(stderr, "task %d of process %d: %s\n", task->id, task->process,
                 task->state == Task::State::kBlocked ? "waits"
                 : task->state == Task::State::kReady ? "ready"
                                                      : "ended");
  }
  std::abort();
}

}  // namespace fsdp::simulation
