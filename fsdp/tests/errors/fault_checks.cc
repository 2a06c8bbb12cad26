#include "fsdp/tests/errors/fault_checks.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "base/testing/users_error.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing::faults {

Outcome Iterate(const Case& c, Trainer& trainer, int64_t part) {
  Outcome outcome;
  trainer.loss = 0;
  outcome.status = TorchToStatus("iteration", [&] {
    try {
      c.iterate(trainer, part);
    } catch (const StatusError&) {
      outcome.type = FaultType::kStatus;
      throw;
    } catch (const UsersError&) {
      outcome.type = FaultType::kUsers;
      throw;
    } catch (const c10::Error&) {
      outcome.type = FaultType::kTorch;
      throw;
    }
  });
  return outcome;
}

absl::Status Wrong(const std::string& text) {
  return absl::InternalError(text);
}

absl::Status CheckReported(const Outcome& outcome,
                           const FaultInjector& injector, FaultType type,
                           bool keeps_type) {
  constexpr absl::StatusCode kCodes[] = {absl::StatusCode::kDataLoss,
                                         absl::StatusCode::kUnknown,
                                         absl::StatusCode::kInternal};
  const absl::Status& status = outcome.status;
  if (!absl::StrContains(status.message(), injector.text())) {
    return Wrong(absl::StrCat("reported as ", status.ToString()));
  }
  if (status.code() != kCodes[static_cast<int>(type)]) {
    return Wrong(absl::StrCat("reported with code ", status.ToString()));
  }
  if (keeps_type && outcome.type != type) {
    return Wrong("the exception has changed its type");
  }
  return absl::OkStatus();
}

Values ShardsOf(const Trainer& trainer) {
  Values values;
  for (const TensorRange& named : trainer.model->Ranges()) {
    values.push_back(named.values.detach().clone());
  }
  return values;
}

void SetShards(Trainer& trainer, const Values& values) {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) {
    at::Tensor shard = trainer.model->Ranges()[i].values;
    shard.copy_(values[i]);
  }
}

absl::Status CheckNotTorn(const Trainer& trainer,
                          const std::vector<Values>& choices) {
  for (size_t i = 0; i < choices.front().size(); ++i) {
    const TensorRange& named = trainer.model->Ranges()[i];
    if (std::none_of(choices.begin(), choices.end(), [&](const Values& values) {
          return at::equal(named.values, values[i]);
        })) {
      return Wrong(absl::StrCat(named.name, " is torn"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNothingGathered(const Trainer& trainer) {
  const MemoryStats stats = trainer.model->memory_stats();
  if (stats.parameters.in_use_bytes != 0) {
    return Wrong("unsharded memory is left");
  }
  if (stats.gradients.in_use_bytes != 0) return Wrong("a gradient is left");
  for (const at::Tensor& parameter : trainer.model.module()->parameters()) {
    const absl::Status read =
        TorchToStatus("read", [&] { parameter.detach().sum(); });
    if (!absl::StrContains(read.message(), "the parameters of unit ")) {
      return Wrong(
          absl::StrCat("reading a freed parameter: ", read.ToString()));
    }
    if (parameter.requires_grad() &&
        !absl::StartsWith(parameter.grad_fn()->name(), "fsdp::Sharded")) {
      return Wrong("a parameter still belongs to a graph");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSame(const Trainer& trainer, const Trainer& reference) {
  if (trainer.loss != reference.loss) {
    return Wrong(absl::StrCat("loss ", trainer.loss, ", not ", reference.loss));
  }
  return CheckNotTorn(trainer, {ShardsOf(reference)});
}

absl::Status CheckNamed(const absl::Status& status, int faulty_rank) {
  if (status.ok()) return status;
  if (!absl::IsDeadlineExceeded(status) &&
      (absl::StrContains(status.message(), "injected at ") ||
       absl::StrContains(status.message(),
                         absl::StrCat("rank ", faulty_rank)))) {
    return absl::OkStatus();
  }
  return Wrong(absl::StrCat("a peer ended with ", status.ToString()));
}

Group::Group(int world, bool aborts) : injectors_(world) {
  comm::LocalGroupOptions options;
  options.timeout = absl::Seconds(20);
  auto communicators = ValueOrThrow(comm::CreateLocalGroup(world, options));
  for (int rank = 0; rank < world; ++rank) {
    communicators_.push_back(InjectFaults(std::move(communicators[rank]),
                                          &injectors_[rank], aborts));
  }
}

bool Group::has_failed() const {
  return std::any_of(
      injectors_.begin(), injectors_.end(),
      [](const FaultInjector& i) { return !i.failed_at().empty(); });
}

absl::Status Group::Run(const std::function<absl::Status(Communicator&)>& run) {
  return AllOk(RunRanks(communicators_, run));
}

absl::Status EndOfAll::Reach() {
  absl::MutexLock lock(&mutex_);
  --running_;
  const auto all = [this]() { return running_ == 0; };
  return mutex_.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(30))
             ? absl::OkStatus()
             : Wrong("a peer has not ended");
}

}  // namespace fsdp::testing::faults
