// Many threads of which one runs at a time, in an order that a seed decides,
// with a clock of their own.
#ifndef TESTING_SIMULATION_SIMULATION_H_
#define TESTING_SIMULATION_SIMULATION_H_

#include <pthread.h>
#include <semaphore.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/fnv1a.h"

namespace fsdp::simulation {

class Simulation;

// A thread of a simulation.
struct Task {
  enum class State { kReady, kBlocked, kEnded };

  Task(Simulation* of, int task_id, int of_process)
      : simulation(of), id(task_id), process(of_process) {
    sem_init(&baton, /*pshared=*/0, 0);
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() { sem_destroy(&baton); }

  Simulation* const simulation;
  const int id;
  const int process;
  sem_t baton;  // is posted when it is this task's turn
  State state = State::kReady;
  int64_t runs_at = 0;  // of a ready task
  uint64_t tie = 0;     // orders tasks of the same time
  // These are of a blocked task.
  const std::function<bool()>* ready = nullptr;
  absl::Time deadline = absl::InfiniteFuture();
  bool timed_out = false;

  const void* identity = nullptr;  // Abseil's identity of the thread
  int64_t posts = 0;
  pthread_t thread = {};
};

// A task is a thread that runs only while it holds the baton. It gives it away
// at Event(), and where it waits: for a mutex of Abseil's, a thread that it
// joins, a time, or what Block() is told. What a task calls sees simulated time
// and starts threads that are tasks (interposed.cc). A process is a set of
// tasks that die together: a rank.
//
// Not thread-safe, since only the holder of the baton calls it.
class Simulation {
 public:
  static constexpr int kDriver = -1;  // the process of Run()'s caller

  struct Options {
    uint64_t seed = 0;
    bool keep_log = false;
  };

  explicit Simulation(const Options& options);
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;
  ~Simulation();

  // Returns the simulation of the calling task, null for any other thread.
  static Simulation* Current();

  // Between these calls the calling thread is a task of kDriver.
  void Enter();
  void Leave();

  // Runs all `bodies`, the first tasks of process 0, 1 and so on, until those
  // that live have ended. Then what is dead runs to its end (IsDead()), and
  // actions of After() that have not happened never do. Is called between
  // Enter() and Leave().
  void RunProcesses(const std::vector<std::function<void()>>& bodies);

  // --- For tasks ------------------------------------------------------------
  // Logs `text`, lets time pass and others run. What happens to a process
  // happens here.
  void Event(absl::string_view text);
  // Returns false if `deadline` came first. Any task may ask `ready`, often.
  bool Block(const std::function<bool()>& ready, absl::Time deadline);
  void Sleep(absl::Duration duration);
  int process() const;

  // The simulated wall clock, and the time since the start, which never jumps.
  absl::Time Now() const;
  int64_t elapsed_nanos() const { return now_; }

  // Calls `action` after `delay`, in whichever task runs then.
  void After(absl::Duration delay, std::function<void()> action);
  // Also marks its place in the log.
  void Log(absl::string_view text);

  // Return a number below `bound` > 0; true so often in a thousand; a time from
  // 0 to `most`, often short.
  uint64_t Random(uint64_t bound);
  bool Chance(int per_mille) { return Random(1000) < uint64_t(per_mille); }
  absl::Duration RandomDelay(absl::Duration most);

  // --- What happens to processes --------------------------------------------
  // `hook` is told of each Event() of a process, with its number there.
  void set_on_event(std::function<void(int process, int64_t number)> hook) {
    on_event_ = std::move(hook);
  }
  // No task of it runs again until all that live have ended. Then its tasks run
  // so that their threads end: whoever simulates the world asks IsDead() and
  // lets nothing that they do reach anybody.
  void Kill(int process);
  bool IsDead(int process) const;
  void Stop(int process, absl::Duration duration);
  void Slow(int process, int factor);
  // Lets the wall clock jump.
  void JumpClock(absl::Duration by);

  // Reports a broken contract. The first one stays.
  void Violation(absl::string_view text);
  const std::string& violation() const { return violation_; }

  // Returns the hash of all that was logged, the same for the same seed.
  uint64_t log_hash() const { return log_hash_; }
  const std::vector<std::string>& log() const { return log_; }
  int64_t events() const { return events_; }

  // --- For interposed.cc ----------------------------------------------------
  Task* StartTask(int process);  // for the thread that is about to be started
  void BeginTask(Task* task);    // in that thread; returns with the baton
  void EndTask(Task* task);      // last; gives the baton away
  void AwaitTask(Task* task);    // after it the thread can be joined
  Task* FindTask(uint64_t thread);
  void RemoveTask(Task* task);
  // Abseil's semaphores of threads, by identity; AwaitPost() for the caller's.
  bool AwaitPost(const void* identity, absl::Time deadline);
  bool Post(const void* identity);
  int process_of_new_threads() const;
  int64_t wall_nanos() const;
  int64_t steady_nanos() const;

 private:
  struct Process;
  struct Timer;

  Process& ProcessOf(int process) const;
  // Gives the baton to the task that is next; returns when it is back.
  void Switch();
  Task* Next();
  // Returns when the task can run, in nanoseconds, or -1 for never so far.
  int64_t TimeOf(Task& task);
  int64_t SteadyTimeOf(absl::Time deadline) const;
  bool AllEnded(bool the_dead_too) const;
  [[noreturn]] void Hang(absl::string_view why) const;

  const Options options_;
  std::mt19937_64 random_;
  int64_t now_ = 0;
  int64_t jumped_ = 0;
  int64_t next_timer_ = 0;
  int64_t events_ = 0;
  bool ghosts_run_ = false;
  int spawning_ = kDriver - 1;  // process of a thread of RunProcesses()
  std::vector<std::unique_ptr<Task>> tasks_;
  int next_task_ = 0;
  std::vector<std::unique_ptr<Process>> processes_;  // kDriver first
  std::vector<Timer> timers_;                        // a heap
  std::function<void(int, int64_t)> on_event_;
  std::string violation_;
  uint64_t log_hash_ = kFnv1a;
  std::vector<std::string> log_;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_SIMULATION_H_
