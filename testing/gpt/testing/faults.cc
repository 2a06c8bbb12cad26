#include "testing/gpt/testing/faults.h"

#include <signal.h>
#include <unistd.h>

#include <limits>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace gpt {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::CollectiveArgs;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::ForwardingCommunicator;
using ::fsdp::comm::StartedWork;
using ::fsdp::comm::Work;

constexpr std::pair<absl::string_view, FaultKind> kKinds[] = {
    {"kill", FaultKind::kKill},   {"stop", FaultKind::kStop},
    {"segv", FaultKind::kSegv},   {"abort", FaultKind::kAbort},
    {"throw", FaultKind::kThrow}, {"error", FaultKind::kError},
    {"exit", FaultKind::kExit},   {"nan", FaultKind::kNan},
    {"slow", FaultKind::kSlow},
};
constexpr std::pair<absl::string_view, std::optional<Collective>>
    kOperations[] = {
        {"any", std::nullopt},
        {"all_gather", Collective::kAllGather},
        {"reduce_scatter", Collective::kReduceScatter},
        {"all_reduce", Collective::kAllReduce},
};
constexpr std::pair<absl::string_view, bool> kMoments[] = {{"start", false},
                                                           {"wait", true}};

absl::Status Wrong(absl::string_view key, absl::string_view value,
                   absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("fault plan: ", key, "=", value, ": expected ", expected));
}

// Looks up the value of `name` in a table.
template <typename T, size_t kCount>
absl::Status Look(const std::pair<absl::string_view, T> (&table)[kCount],
                  absl::string_view key, absl::string_view name, T* value) {
  std::string names;
  for (const auto& [known, its_value] : table) {
    if (known == name) {
      *value = its_value;
      return absl::OkStatus();
    }
    absl::StrAppend(&names, names.empty() ? "" : ", ", known);
  }
  return Wrong(key, name, absl::StrCat("one of ", names));
}

template <typename T>
absl::Status Count(absl::string_view key, absl::string_view text, T least,
                   T* value) {
  if (absl::SimpleAtoi(text, value) && *value >= least) return absl::OkStatus();
  return Wrong(key, text, absl::StrCat("a number of at least ", least));
}

absl::Status Set(absl::string_view key, absl::string_view value, Fault* fault) {
  if (key == "fault") return Look(kKinds, key, value, &fault->kind);
  if (key == "operation") {
    return Look(kOperations, key, value, &fault->operation);
  }
  if (key == "when") return Look(kMoments, key, value, &fault->in_wait);
  if (key == "restart") return Count(key, value, 0, &fault->restart);
  if (key == "replica") return Count(key, value, 0, &fault->replica);
  if (key == "rank") return Count(key, value, 0, &fault->rank);
  if (key == "step") return Count(key, value, int64_t{1}, &fault->step);
  if (key == "call") return Count(key, value, int64_t{0}, &fault->call);
  return Wrong(key, value,
               "fault, restart, replica, rank, step, operation, call or when");
}

constexpr absl::string_view kStepEnd = "step ";

// A slow rank takes this many times its time longer.
constexpr int kSlowdown = 9;

// Does to the rank what the fault says; returns if the rank still lives.
absl::Status Strike(const Fault& fault) {
  // One write(): a line of ranks that die at the same time stays whole.
  const std::string line = absl::StrFormat(
      "injected %s into step %d at %.6f\n", Name(fault.kind), fault.step,
      absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  static_cast<void>(written);
  switch (fault.kind) {
    case FaultKind::kKill:
      raise(SIGKILL);
      break;
    case FaultKind::kStop:
      raise(SIGSTOP);
      break;
    case FaultKind::kSegv:
      raise(SIGSEGV);
      break;
    case FaultKind::kAbort:
      raise(SIGABRT);
      break;
    case FaultKind::kThrow:
      throw std::runtime_error("an injected exception");
    case FaultKind::kError:
      return absl::UnavailableError("an injected error");
    case FaultKind::kExit:
      _exit(0);
    case FaultKind::kNan:
    case FaultKind::kSlow:
      break;
  }
  return absl::OkStatus();
}

class FaultyWork final : public Work {
 public:
  FaultyWork(std::unique_ptr<Work> base, Communicator* communicator,
             const Fault& fault)
      : base_(std::move(base)), communicator_(communicator), fault_(fault) {}

  absl::Status Wait(absl::Time deadline) override {
    FSDP_RETURN_IF_ERROR(Strike(fault_));
    return base_->Wait(deadline);
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + communicator_->default_timeout());
  }

 private:
  const std::unique_ptr<Work> base_;
  Communicator* const communicator_;
  const Fault fault_;
};

class FaultyCommunicator final : public ForwardingCommunicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> base, const Fault& fault)
      : ForwardingCommunicator(std::move(base)), fault_(fault) {}

 private:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const bool ends_step = args.collective == Collective::kAllReduce &&
                           absl::StartsWith(label, kStepEnd);
    if (ends_step) Dawdle();
    StartedWork work = Fits(args.collective)
                           ? Fail(args, label)
                           : base().StartCollective(args, label);
    if (ends_step) {
      ++step_;
      calls_ = 0;
    }
    return work;
  }

  StartedWork Fail(const CollectiveArgs& args, absl::string_view label) {
    if (fault_.kind == FaultKind::kSlow) is_slow_ = true;
    if (fault_.kind == FaultKind::kNan &&
        args.collective == Collective::kReduceScatter) {
      args.in.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    if (!fault_.in_wait) {
      FSDP_RETURN_IF_ERROR(Strike(fault_));
      return base().StartCollective(args, label);
    }
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Work> work,
                          base().StartCollective(args, label));
    return std::make_unique<FaultyWork>(std::move(work), &base(), fault_);
  }

  bool Fits(Collective collective) {
    if (step_ != fault_.step || collective == Collective::kAllToAll ||
        collective == Collective::kBroadcast ||
        collective != fault_.operation.value_or(collective)) {
      return false;
    }
    return calls_++ == fault_.call;
  }

  // Makes a slow rank's step take longer, at its end.
  void Dawdle() {
    const absl::Time now = absl::Now();
    if (is_slow_) absl::SleepFor(kSlowdown * (now - step_begin_));
    step_begin_ = absl::Now();
  }

  const Fault fault_;
  int64_t step_ = 1;
  int64_t calls_ = 0;  // of the operation, in the step
  bool is_slow_ = false;
  absl::Time step_begin_ = absl::Now();
};

class SlowCommunicator final : public ForwardingCommunicator {
 public:
  SlowCommunicator(std::unique_ptr<Communicator> base, std::string path)
      : ForwardingCommunicator(std::move(base)), path_(std::move(path)) {}

 private:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    if (args.collective == Collective::kAllReduce &&
        absl::StartsWith(label, kStepEnd)) {
      const absl::Time end = absl::Now() + kSlowStep;
      while (absl::Now() < end && access(path_.c_str(), F_OK) == 0) {
        absl::SleepFor(absl::Milliseconds(1));
      }
    }
    return base().StartCollective(args, label);
  }

  const std::string path_;
};

}  // namespace

absl::StatusOr<std::vector<Fault>> ParseFaultPlan(absl::string_view text) {
  std::vector<Fault> plan;
  for (absl::string_view entry : absl::StrSplit(text, ';', absl::SkipEmpty())) {
    Fault fault;
    bool has_kind = false;
    for (absl::string_view field : absl::StrSplit(entry, ',')) {
      const std::pair<absl::string_view, absl::string_view> parts =
          absl::StrSplit(field, absl::MaxSplits('=', 1));
      FSDP_RETURN_IF_ERROR(Set(parts.first, parts.second, &fault));
      has_kind = has_kind || parts.first == "fault";
    }
    if (!has_kind) return Wrong("fault", "", "a fault in each entry");
    plan.push_back(fault);
  }
  return plan;
}

std::optional<Fault> FaultOf(const std::vector<Fault>& plan, int restart,
                             int replica, int rank) {
  for (const Fault& fault : plan) {
    if (fault.restart == restart && fault.replica == replica &&
        fault.rank == rank) {
      return fault;
    }
  }
  return std::nullopt;
}

absl::string_view Name(FaultKind kind) {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "?";
}

std::unique_ptr<Communicator> WithFault(std::unique_ptr<Communicator> base,
                                        const Fault& fault) {
  return std::make_unique<FaultyCommunicator>(std::move(base), fault);
}

std::unique_ptr<Communicator> SlowWhile(std::unique_ptr<Communicator> base,
                                        const std::string& path) {
  return std::make_unique<SlowCommunicator>(std::move(base), path);
}

}  // namespace gpt
