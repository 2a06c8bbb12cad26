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

#include "absl/strings/str_cat.h"
#include "checkpoint/run/training_json.h"

namespace fsdp::checkpoint {
namespace {

using torch::optim::OptimizerOptions;
using Betas = std::tuple<double, double>;

constexpr char kClass[] = "class";

// Calls visitor(name, reference) for what a class of options has.
template <typename Visitor>
void Visit(torch::optim::SGDOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("momentum", options.momentum());
  visitor("dampening", options.dampening());
  visitor("weight_decay", options.weight_decay());
  visitor("nesterov", options.nesterov());
}
// Those of Adam and AdamW.
template <typename Options, typename Visitor>
void Visit(Options& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("betas", options.betas());
  visitor("eps", options.eps());
  visitor("weight_decay", options.weight_decay());
  visitor("amsgrad", options.amsgrad());
}
template <typename Visitor>
void Visit(torch::optim::AdagradOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("lr_decay", options.lr_decay());
  visitor("weight_decay", options.weight_decay());
  visitor("initial_accumulator_value", options.initial_accumulator_value());
  visitor("eps", options.eps());
}
template <typename Visitor>
void Visit(torch::optim::RMSpropOptions& options, Visitor& visitor) {
  visitor("lr", options.lr());
  visitor("alpha", options.alpha());
  visitor("eps", options.eps());
  visitor("weight_decay", options.weight_decay());
  visitor("momentum", options.momentum());
  visitor("centered", options.centered());
}

class Printer {
 public:
  void operator()(const char* name, bool value) { Add(name, value); }
  void operator()(const char* name, double value) {
    if (!std::isfinite(value)) not_finite_ = name;
    Add(name, value);
  }
  void operator()(const char* name, const Betas& value) {
    if (!std::isfinite(std::get<0>(value) + std::get<1>(value))) {
      not_finite_ = name;
    }
    Add(name, Json::Array{std::get<0>(value), std::get<1>(value)});
  }

  absl::StatusOr<Json> Finish(const char* name) && {
    if (!not_finite_.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the option ", not_finite_, " of ", name,
                       " is not finite, which no checkpoint can hold"));
    }
    members_.insert(members_.begin(), {kClass, name});
    return Json(std::move(members_));
  }

 private:
  void Add(const char* name, Json value) {
    members_.emplace_back(name, std::move(value));
  }

  Json::Object members_;
  std::string not_finite_;
};

class Parser {
 public:
  explicit Parser(const Json& json) : json_(json) {}

  void operator()(const char* name, bool& value) {
    seen_.insert(name);
    const bool* const found = json_.FindAs<bool>(name);
    found == nullptr ? Refuse(name, "true or false") : void(value = *found);
  }
  void operator()(const char* name, double& value) {
    seen_.insert(name);
    const Json* const member = json_.Find(name);
    if (member == nullptr || !IsNumber(*member)) {
      return Refuse(name, "a number");
    }
    value = member->NumberOr(0);
  }
  void operator()(const char* name, Betas& value) {
    seen_.insert(name);
    const Json::Array* const pair = json_.FindAs<Json::Array>(name);
    if (pair == nullptr || pair->size() != 2 || !IsNumber((*pair)[0]) ||
        !IsNumber((*pair)[1])) {
      return Refuse(name, "a pair of numbers");
    }
    value = Betas((*pair)[0].NumberOr(0), (*pair)[1].NumberOr(0));
  }

  absl::Status Finish() const {
    if (!status_.ok()) return status_;
    for (const auto& [name, value] : *json_.As<Json::Object>()) {
      if (name == kClass || seen_.count(name) > 0) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the options of an optimizer have \"", name,
                       "\", which this version of the library does not know"));
    }
    return absl::OkStatus();
  }

 private:
  static bool IsNumber(const Json& json) {
    return json.As<double>() != nullptr || json.As<int64_t>() != nullptr;
  }
  void Refuse(const char* name, const char* expected) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(
        "the options of an optimizer: \"", name, "\" is not ", expected));
  }

  const Json& json_;
  std::set<std::string> seen_;
  absl::Status status_;
};

// A class of options, and what it is called.
template <typename T>
struct Class {
  using Options = T;
  const char* name;
};

// Calls visitor(Class<...>) for each class until one returns true.
template <typename Visitor>
bool AnyClass(Visitor visitor) {
  return visitor(Class<torch::optim::SGDOptions>{"SGD"}) ||
         visitor(Class<torch::optim::AdamOptions>{"Adam"}) ||
         visitor(Class<torch::optim::AdamWOptions>{"AdamW"}) ||
         visitor(Class<torch::optim::AdagradOptions>{"Adagrad"}) ||
         visitor(Class<torch::optim::RMSpropOptions>{"RMSprop"});
}

}  // namespace

absl::StatusOr<Json> OptionsToJson(const OptimizerOptions& options) {
  absl::StatusOr<Json> result = absl::InvalidArgumentError(
      "the optimizer is of a class that is not known: checkpoints hold SGD, "
      "Adam, AdamW, Adagrad and RMSprop of torch::optim");
  AnyClass([&](auto of_class) {
    using Options = typename decltype(of_class)::Options;
    const auto* const known = dynamic_cast<const Options*>(&options);
    if (known == nullptr) return false;
    Options copy = *known;  // its accessors are not const
    Printer printer;
    Visit(copy, printer);
    result = std::move(printer).Finish(of_class.name);
    return true;
  });
  return result;
}

absl::StatusOr<std::unique_ptr<OptimizerOptions>> OptionsFromJson(
    const Json& json) {
  const std::string* const text = json.FindAs<std::string>(kClass);
  if (text == nullptr) {
    return absl::InvalidArgumentError(
        "the options of an optimizer do not say of which class they are");
  }
  absl::StatusOr<std::unique_ptr<OptimizerOptions>> result =
      absl::InvalidArgumentError(
          absl::StrCat("the options of an optimizer are of the class ", *text,
                       ", which this version of the library does not know"));
  AnyClass([&](auto of_class) {
    if (*text != of_class.name) return false;
    auto options =
        std::make_unique<typename decltype(of_class)::Options>(/*lr=*/0);
    Parser parser(json);
    Visit(*options, parser);
    const absl::Status parsed = parser.Finish();
    if (parsed.ok()) {
      result = std::unique_ptr<OptimizerOptions>(std::move(options));
    } else {
      result = parsed;
    }
    return true;
  });
  return result;
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
