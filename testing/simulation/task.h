// A thread of a simulation.
#ifndef TESTING_SIMULATION_TASK_H_
#define TESTING_SIMULATION_TASK_H_

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/time/time.h"
#include "testing/simulation/baton.h"

namespace fsdp::simulation {

class Simulation;

struct Task {
  enum class State { kReady, kBlocked, kEnded };

  Task(Simulation* of, int task_id, int of_process,
       std::unique_ptr<Baton> its_baton)
      : simulation(of),
        id(task_id),
        process(of_process),
        baton(std::move(its_baton)) {}
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  Simulation* const simulation;
  const int id;
  const int process;
  const std::unique_ptr<Baton> baton;
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

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_TASK_H_
