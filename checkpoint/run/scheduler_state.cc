#include "checkpoint/run/scheduler_state.h"

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "fsdp/optim/warm_up_cosine.h"

namespace fsdp::checkpoint {
namespace {

using Plateau = torch::optim::ReduceLROnPlateauScheduler;
using ::torch::optim::StepLR;

// A class may name its base's protected members.
struct Steps : torch::optim::LRScheduler {
  static constexpr unsigned torch::optim::LRScheduler::*Member() {
    return &Steps::step_count_;
  }
};

// LibTorch has no other way to these: access is not checked in what an explicit
// instantiation names ([temp.spec.general]).
template <typename Tag, typename Tag::Type kMember>
struct Opens {
  friend constexpr typename Tag::Type MemberOf(Tag) { return kMember; }
};
struct Best {
  using Type = float Plateau::*;
  friend constexpr Type MemberOf(Best);
};
struct LastEpoch {
  using Type = int Plateau::*;
  friend constexpr Type MemberOf(LastEpoch);
};
struct BadEpochs {
  using Type = int Plateau::*;
  friend constexpr Type MemberOf(BadEpochs);
};
struct Cooldown {
  using Type = int Plateau::*;
  friend constexpr Type MemberOf(Cooldown);
};
struct StepSize {
  using Type = const unsigned StepLR::*;
  friend constexpr Type MemberOf(StepSize);
};
struct Gamma {
  using Type = const double StepLR::*;
  friend constexpr Type MemberOf(Gamma);
};
template struct Opens<StepSize, &StepLR::step_size_>;
template struct Opens<Gamma, &StepLR::gamma_>;
template struct Opens<Best, &Plateau::best>;
template struct Opens<LastEpoch, &Plateau::last_epoch>;
template struct Opens<BadEpochs, &Plateau::num_bad_epochs>;
template struct Opens<Cooldown, &Plateau::cooldown_counter>;

}  // namespace

int64_t StepsOf(const torch::optim::LRScheduler& scheduler) {
  return scheduler.*Steps::Member();
}

void SetSteps(torch::optim::LRScheduler& scheduler, int64_t steps) {
  scheduler.*Steps::Member() = static_cast<unsigned>(steps);
  auto* const cosine = dynamic_cast<WarmUpCosine*>(&scheduler);
  if (cosine != nullptr) cosine->SetRates();
}

std::string SettingsOf(const torch::optim::LRScheduler& scheduler) {
  if (const auto* cosine = dynamic_cast<const WarmUpCosine*>(&scheduler)) {
    return cosine->ToString();
  }
  const auto* const steps = dynamic_cast<const StepLR*>(&scheduler);
  if (steps == nullptr) return "";
  return absl::StrCat("StepLR: step_size ", steps->*MemberOf(StepSize()),
                      ", gamma ", steps->*MemberOf(Gamma()));
}

PlateauState StateOf(const Plateau& scheduler) {
  return {scheduler.*MemberOf(Best()), scheduler.*MemberOf(LastEpoch()),
          scheduler.*MemberOf(BadEpochs()), scheduler.*MemberOf(Cooldown())};
}

void SetState(Plateau& scheduler, const PlateauState& state) {
  scheduler.*MemberOf(Best()) = state.best;
  scheduler.*MemberOf(LastEpoch()) = static_cast<int>(state.last_epoch);
  scheduler.*MemberOf(BadEpochs()) = static_cast<int>(state.bad_epochs);
  scheduler.*MemberOf(Cooldown()) = static_cast<int>(state.cooldown);
}

}  // namespace fsdp::checkpoint
