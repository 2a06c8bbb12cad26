#include "testing/simulation/workers.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/json.h"

namespace fsdp::simulation {
namespace {

// Returns a line that tells of a seed.
std::string ToLine(int64_t seed, const SeedResult& result) {
  const Json line(Json::Object{{"seed", seed},
                               {"log_hash", result.log_hash},
                               {"events", result.events},
                               {"problem", result.problem},
                               {"features", result.features}});
  return line.ToString() + "\n";
}

SeedResult FromLine(absl::string_view text, int64_t* seed) {
  const Json line = Json::Parse(text).value();
  SeedResult result;
  *seed = *line.Find("seed")->As<int64_t>();
  result.log_hash = *line.Find("log_hash")->As<int64_t>();
  result.events = *line.Find("events")->As<int64_t>();
  result.problem = *line.Find("problem")->As<std::string>();
  for (const Json& feature : *line.Find("features")->As<Json::Array>()) {
    result.features.push_back(*feature.As<std::string>());
  }
  return result;
}

constexpr int64_t kNone = -1;

struct Shared {
  struct Slot {
    std::atomic<int64_t> seed{kNone};  // the seed that it simulates
    std::atomic<int64_t> since{0};     // Unix nanoseconds
  };
  static constexpr int kMostSlots = 1024;

  std::atomic<int64_t> next{0};
  std::atomic<bool> stops{false};
  Slot slots[kMostSlots];
};

Shared* Share() {
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  FSDP_CHECK(memory != MAP_FAILED);
  return new (memory) Shared;
}

// Pins this process to core `number` of those that it may use.
void UseCore(int number) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  if (number >= CPU_COUNT(&allowed)) return;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || number-- > 0) continue;
    cpu_set_t mine;
    CPU_ZERO(&mine);
    CPU_SET(core, &mine);
    sched_setaffinity(0, sizeof(mine), &mine);
    return;
  }
}

void WriteAll(int descriptor, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count =
        write(descriptor, bytes.data() + done, bytes.size() - done);
    if (count > 0) done += count;
    if (count < 0 && errno != EINTR) _exit(1);  // nobody listens
  }
}

// Says how a process has ended that has not ended well.
std::string Describe(int status) {
  if (WIFSIGNALED(status)) {
    return absl::StrCat("is ended by signal ", WTERMSIG(status), " (",
                        strsignal(WTERMSIG(status)), ")");
  }
  return absl::StrCat("exits with ", WEXITSTATUS(status));
}

class Workers {
 public:
  explicit Workers(const WorkersOptions& options)
      : options_(options), shared_(*Share()), workers_(options.jobs) {
    FSDP_CHECK(options.jobs > 0 && options.jobs <= Shared::kMostSlots);
    shared_.next = options.first;
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() { munmap(&shared_, sizeof(Shared)); }

  void Run() {
    for (int slot = 0; slot < options_.jobs; ++slot) Start(slot);
    while (running_ > 0) {
      Listen();
      KillWhoIsTooLong();
    }
  }

 private:
  struct Worker {
    pid_t process = -1;
    int descriptor = -1;  // its messages
    std::string bytes;    // of the next message
    bool too_long = false;
  };

  void Start(int slot) {
    int ends[2];
    FSDP_CHECK(pipe(ends) == 0);
    const pid_t parent = getpid();
    const pid_t process = fork();
    FSDP_CHECK(process >= 0);
    if (process == 0) {
      // The worker ends with the process that would read what it writes.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
      close(ends[0]);
      if (options_.jobs > 1) UseCore(slot);
      Work(shared_.slots[slot], ends[1]);
      _exit(0);
    }
    close(ends[1]);
    workers_[slot] = {process, ends[0], "", false};
    ++running_;
  }

  void Work(Shared::Slot& slot, int descriptor) const {
    while (!shared_.stops && absl::Now() < options_.until) {
      const int64_t seed = shared_.next++;
      if (seed >= options_.end) return;
      slot.since = absl::ToUnixNanos(absl::Now());
      slot.seed = seed;
      const SeedResult result = options_.simulate(seed);
      // What follows is not the fault of the seed; a reader that has not seen
      // the message yet learns the result from it alone.
      WriteAll(descriptor, ToLine(seed, result));
      slot.seed = kNone;
    }
  }

  void Listen() {
    std::vector<pollfd> polled;
    polled.reserve(workers_.size());
    for (const Worker& worker : workers_) {
      polled.push_back({worker.descriptor, POLLIN, 0});  // -1 is passed over
    }
    if (poll(polled.data(), polled.size(), /*timeout=*/1000) <= 0) return;
    for (int slot = 0; slot < options_.jobs; ++slot) {
      if (polled[slot].revents != 0) Read(slot);
    }
  }

  void Read(int slot) {
    Worker& worker = workers_[slot];
    char buffer[1 << 16];
    const ssize_t count = read(worker.descriptor, buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) return;
    if (count <= 0) return Ended(slot);
    worker.bytes.append(buffer, count);
    for (size_t end; (end = worker.bytes.find('\n')) != std::string::npos;) {
      int64_t seed = 0;
      const SeedResult result =
          FromLine(absl::string_view(worker.bytes).substr(0, end), &seed);
      worker.bytes.erase(0, end + 1);
      Take(seed, result);
    }
  }

  void Ended(int slot) {
    Worker& worker = workers_[slot];
    int status = 0;
    while (waitpid(worker.process, &status, 0) < 0) FSDP_CHECK(errno == EINTR);
    close(worker.descriptor);
    worker.descriptor = -1;
    --running_;
    const int64_t seed = shared_.slots[slot].seed.exchange(kNone);
    if (status == 0) return;
    FSDP_CHECK(seed != kNone);  // a worker does nothing else that could fail
    SeedResult result;
    result.problem =
        absl::StrCat("its process ", worker.too_long ? "does not end and " : "",
                     Describe(status));
    Take(seed, result);
    if (!shared_.stops) Start(slot);
  }

  void KillWhoIsTooLong() {
    const absl::Time now = absl::Now();
    for (int slot = 0; slot < options_.jobs; ++slot) {
      Worker& worker = workers_[slot];
      const Shared::Slot& its = shared_.slots[slot];
      if (worker.descriptor < 0 || worker.too_long || its.seed == kNone) {
        continue;
      }
      if (now - absl::FromUnixNanos(its.since) < options_.longest) continue;
      worker.too_long = true;
      kill(worker.process, SIGKILL);
    }
  }

  void Take(int64_t seed, const SeedResult& result) {
    if (!options_.take(seed, result)) shared_.stops = true;
  }

  const WorkersOptions options_;
  Shared& shared_;
  std::vector<Worker> workers_;
  int running_ = 0;
};

}  // namespace

void RunWorkers(const WorkersOptions& options) { Workers(options).Run(); }

}  // namespace fsdp::simulation
