#include "base/start_thread.h"

#include <sys/resource.h>

#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/control_groups.h"

namespace fsdp {
namespace {

std::string FirstWord(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// Returns the limit of this process's control group, or "" if there is none.
std::string LimitOfControlGroup() {
  for (const ControlGroup& group : ControlGroups("pids")) {
    std::string limit = FirstWord(group.folder + "/pids.max");
    if (!limit.empty()) return limit;
  }
  return "";
}

}  // namespace

std::string ThreadLimits() {
  std::vector<std::string> limits;
  rlimit user = {};
  if (getrlimit(RLIMIT_NPROC, &user) == 0) {
    limits.push_back(absl::StrCat("this user may have ",
                                  user.rlim_cur == RLIM_INFINITY
                                      ? "any number of"
                                      : absl::StrCat(user.rlim_cur),
                                  " processes and threads (ulimit -u)"));
  }
  if (const std::string group = LimitOfControlGroup(); !group.empty()) {
    limits.push_back(absl::StrCat("the control group ", group, " (pids.max)"));
  }
  if (const std::string all = FirstWord("/proc/sys/kernel/threads-max");
      !all.empty()) {
    limits.push_back(absl::StrCat("the system ", all, " (kernel.threads-max)"));
  }
  if (rlimit space = {};
      getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    limits.push_back(absl::StrCat("this process ", space.rlim_cur,
                                  " bytes of addresses (ulimit -v)"));
  }
  return absl::StrJoin(limits, ", ");
}

absl::StatusOr<std::thread> StartThread(absl::string_view purpose,
                                        absl::AnyInvocable<void() &&> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& e) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread ", purpose, ": ",
                     e.code().message(), "; ", ThreadLimits()));
  }
}

absl::Status IoThreads::Start(absl::string_view purpose, int count) {
  while (count-- > 0) {
    absl::StatusOr<std::thread> thread =
        StartThread(purpose, [this] { Work(); });
    if (!thread.ok()) {
      return threads_.empty() ? thread.status() : absl::OkStatus();
    }
    threads_.push_back(*std::move(thread));
  }
  return absl::OkStatus();
}

IoThreads::~IoThreads() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void IoThreads::Run(absl::AnyInvocable<void()> job) {
  if (threads_.empty()) {
    job();
    return;
  }
  absl::MutexLock lock(&mutex_);
  jobs_.push_back(std::move(job));
}

void IoThreads::Work() {
  absl::MutexLock lock(&mutex_);
  for (;;) {
    mutex_.Await(absl::Condition(this, &IoThreads::HasWork));
    if (jobs_.empty()) return;
    absl::AnyInvocable<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    mutex_.Unlock();
    job();
    job = nullptr;
    mutex_.Lock();
  }
}

}  // namespace fsdp
