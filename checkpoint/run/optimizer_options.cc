#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <set>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "checkpoint/run/training_json.h"

namespace fsdp::checkpoint {
namespace {

using torch::optim::OptimizerOptions;
using Betas = std::tuple<double, double>;

constexpr char kClass[] = "class";

// An option of a class, where it is.
struct Option {
  const char* name;
  std::variant<bool*, double*, Betas*> value;
};

struct Class {
  const char* name;  // null: it is not known
  std::vector<Option> options;
};

// Those of Adam and AdamW.
template <typename Options>
std::vector<Option> AdamsOf(Options& adam) {
  return {{"lr", &adam.lr()},
          {"betas", &adam.betas()},
          {"eps", &adam.eps()},
          {"weight_decay", &adam.weight_decay()},
          {"amsgrad", &adam.amsgrad()}};
}

Class ClassOf(OptimizerOptions& options) {
  if (auto* const sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) {
    return {"SGD",
            {{"lr", &sgd->lr()},
             {"momentum", &sgd->momentum()},
             {"dampening", &sgd->dampening()},
             {"weight_decay", &sgd->weight_decay()},
             {"nesterov", &sgd->nesterov()}}};
  }
  if (auto* const adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) {
    return {"Adam", AdamsOf(*adam)};
  }
  if (auto* const adam = dynamic_cast<torch::optim::AdamWOptions*>(&options)) {
    return {"AdamW", AdamsOf(*adam)};
  }
  if (auto* const adagrad =
          dynamic_cast<torch::optim::AdagradOptions*>(&options)) {
    return {
        "Adagrad",
        {{"lr", &adagrad->lr()},
         {"lr_decay", &adagrad->lr_decay()},
         {"weight_decay", &adagrad->weight_decay()},
         {"initial_accumulator_value", &adagrad->initial_accumulator_value()},
         {"eps", &adagrad->eps()}}};
  }
  if (auto* const rms = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) {
    return {"RMSprop",
            {{"lr", &rms->lr()},
             {"alpha", &rms->alpha()},
             {"eps", &rms->eps()},
             {"weight_decay", &rms->weight_decay()},
             {"momentum", &rms->momentum()},
             {"centered", &rms->centered()}}};
  }
  return {nullptr, {}};
}

bool IsNumber(const Json* json) {
  return json != nullptr &&
         (json->As<double>() != nullptr || json->As<int64_t>() != nullptr);
}

// Returns what `json`, which may be null, should have been; null if it is that.
const char* Take(const Json* json, const Option& option) {
  if (auto* const* const flag = std::get_if<bool*>(&option.value)) {
    const bool* const found = json == nullptr ? nullptr : json->As<bool>();
    if (found == nullptr) return "true or false";
    **flag = *found;
  } else if (auto* const* const number = std::get_if<double*>(&option.value)) {
    if (!IsNumber(json)) return "a number";
    **number = json->NumberOr(0);
  } else {
    const auto* const pair =
        json == nullptr ? nullptr : json->As<Json::Array>();
    if (pair == nullptr || pair->size() != 2 || !IsNumber(&(*pair)[0]) ||
        !IsNumber(&(*pair)[1])) {
      return "a pair of numbers";
    }
    *std::get<Betas*>(option.value) = {(*pair)[0].NumberOr(0),
                                       (*pair)[1].NumberOr(0)};
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<Json> OptionsToJson(const OptimizerOptions& options) {
  const std::unique_ptr<OptimizerOptions> copy = options.clone();
  const Class of = ClassOf(*copy);  // accessors of a const one give no place
  if (of.name == nullptr) {
    return absl::InvalidArgumentError(
        "the optimizer is of a class that is not known: checkpoints hold SGD, "
        "Adam, AdamW, Adagrad and RMSprop of torch::optim");
  }
  Json::Object members = {{kClass, of.name}};
  for (const Option& option : of.options) {
    double sum = 0;
    if (auto* const* const flag = std::get_if<bool*>(&option.value)) {
      members.emplace_back(option.name, **flag);
    } else if (auto* const* const one = std::get_if<double*>(&option.value)) {
      members.emplace_back(option.name, sum = **one);
    } else {
      const auto [first, second] = *std::get<Betas*>(option.value);
      sum = first + second;
      members.emplace_back(option.name, Json::Array{first, second});
    }
    if (std::isfinite(sum)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the option ", option.name, " of ", of.name,
                     " is not finite, which no checkpoint can hold"));
  }
  return Json(std::move(members));
}

absl::StatusOr<std::unique_ptr<OptimizerOptions>> OptionsFromJson(
    const Json& json) {
  const std::string* const text = json.FindAs<std::string>(kClass);
  if (text == nullptr) {
    return absl::InvalidArgumentError(
        "the options of an optimizer do not say of which class they are");
  }
  std::unique_ptr<OptimizerOptions> known[] = {
      std::make_unique<torch::optim::SGDOptions>(/*lr=*/0),
      std::make_unique<torch::optim::AdamOptions>(),
      std::make_unique<torch::optim::AdamWOptions>(),
      std::make_unique<torch::optim::AdagradOptions>(),
      std::make_unique<torch::optim::RMSpropOptions>()};
  for (std::unique_ptr<OptimizerOptions>& options : known) {
    const Class of = ClassOf(*options);
    if (*text != of.name) continue;
    std::set<absl::string_view> names = {kClass};
    for (const Option& option : of.options) {
      names.insert(option.name);
      const char* const expected = Take(json.Find(option.name), option);
      if (expected == nullptr) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the options of an optimizer: \"", option.name,
                       "\" is not ", expected));
    }
    for (const auto& [name, value] : *json.As<Json::Object>()) {
      if (names.count(name) > 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the options of an optimizer have \"", name,
                       "\", which this version of the library does not know"));
    }
    return std::move(options);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the options of an optimizer are of the class ", *text,
                   ", which this version of the library does not know"));
}

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
template <typename Tag, auto... kMembers>
struct Opens {
  friend constexpr typename Tag::Type MembersOf(Tag) { return {kMembers...}; }
};
struct OfPlateau {
  using Type = std::tuple<float Plateau::*, int Plateau::*, int Plateau::*,
                          int Plateau::*>;
  friend constexpr Type MembersOf(OfPlateau);
};
struct OfStepLR {
  using Type = std::tuple<const unsigned StepLR::*, const double StepLR::*>;
  friend constexpr Type MembersOf(OfStepLR);
};
template struct Opens<OfPlateau, &Plateau::best, &Plateau::last_epoch,
                      &Plateau::num_bad_epochs, &Plateau::cooldown_counter>;
template struct Opens<OfStepLR, &StepLR::step_size_, &StepLR::gamma_>;

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
  const auto [step_size, gamma] = MembersOf(OfStepLR());
  return absl::StrCat("StepLR: step_size ", steps->*step_size, ", gamma ",
                      steps->*gamma);
}

PlateauState StateOf(const Plateau& scheduler) {
  const auto [best, last_epoch, bad_epochs, cooldown] = MembersOf(OfPlateau());
  return {scheduler.*best, scheduler.*last_epoch, scheduler.*bad_epochs,
          scheduler.*cooldown};
}

void SetState(Plateau& scheduler, const PlateauState& state) {
  const auto [best, last_epoch, bad_epochs, cooldown] = MembersOf(OfPlateau());
  scheduler.*best = state.best;
  scheduler.*last_epoch = static_cast<int>(state.last_epoch);
  scheduler.*bad_epochs = static_cast<int>(state.bad_epochs);
  scheduler.*cooldown = static_cast<int>(state.cooldown);
}

}  // namespace fsdp::checkpoint
