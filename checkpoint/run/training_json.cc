#include "checkpoint/run/training_json.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kFormat[] = "libtorch_fsdp training state";
constexpr int64_t kVersion = 1;

absl::Status Bad(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("the training state of the checkpoint: ", what));
}

// --- Printing ---------------------------------------------------------------

absl::StatusOr<Json> Groups(const std::vector<OptimizerGroup>& groups) {
  Json::Array array;
  for (const OptimizerGroup& group : groups) {
    FSDP_ASSIGN_OR_RETURN(Json options, OptionsToJson(*group.options));
    array.push_back(Json::Object{{"options", std::move(options)},
                                 {"parameters", group.names}});
  }
  return Json(std::move(array));
}

// JSON has no infinity, which is what a scheduler begins with.
Json Metric(float value) {
  if (std::isfinite(value)) return static_cast<double>(value);
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json Plateaus(const std::vector<PlateauState>& states) {
  Json::Array array;
  for (const PlateauState& state : states) {
    array.push_back(Json::Object{{"best", Metric(state.best)},
                                 {"last_epoch", state.last_epoch},
                                 {"bad_epochs", state.bad_epochs},
                                 {"cooldown", state.cooldown}});
  }
  return array;
}

// --- Parsing ----------------------------------------------------------------
// `status` becomes the first thing that is wrong; what is wrong reads as
// nothing.

// The value of `json`, which may be null. `wrong` says that it is no T.
template <typename T>
const T& As(const Json* json, absl::string_view wrong, absl::Status& status) {
  static const T* const nothing = new T();
  const T* const value = json == nullptr ? nullptr : json->As<T>();
  if (value != nullptr) return *value;
  status.Update(Bad(wrong));
  return *nothing;
}

int64_t CountOf(const Json* json, int64_t most, absl::string_view wrong,
                absl::Status& status) {
  const auto count = As<int64_t>(json, wrong, status);
  if (count < 0 || count > most) status.Update(Bad(wrong));
  return count;
}

// The members of an object, all of which have to be taken.
class Members {
 public:
  Members(const Json* json, std::string what, absl::Status& status)
      : what_(std::move(what)),
        object_(As<Json::Object>(json, absl::StrCat(what_, " is no object"),
                                 status)),
        status_(status) {}
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;
  ~Members() {
    if (taken_ == object_.size()) return;
    status_.Update(Bad(absl::StrCat(what_,
                                    " has members that this version of the "
                                    "library does not know")));
  }

  // Null where there is none. To be called once for each.
  const Json* Take(absl::string_view name) {
    for (const auto& [key, value] : object_) {
      if (key != name) continue;
      ++taken_;
      return &value;
    }
    return nullptr;
  }

  int64_t TakeCount(absl::string_view name,
                    int64_t most = std::numeric_limits<int64_t>::max()) {
    return CountOf(Take(name), most,
                   absl::StrCat("\"", name, "\" is no count, or too large"),
                   status_);
  }

  // Takes a count that fits 32 bits.
  int TakeSmallCount(absl::string_view name) {
    return static_cast<int>(
        TakeCount(name, std::numeric_limits<int32_t>::max()));
  }

 private:
  const std::string what_;
  const Json::Object& object_;
  absl::Status& status_;
  size_t taken_ = 0;
};

const Json::Array& ListOf(const Json* json, absl::string_view what,
                          absl::Status& status) {
  return As<Json::Array>(json, absl::StrCat(what, " is no list"), status);
}

std::vector<std::string> NamesOf(const Json* json, absl::string_view what,
                                 absl::Status& status) {
  const std::string wrong = absl::StrCat(what, " has what is no text");
  std::vector<std::string> names;
  for (const Json& name : ListOf(json, what, status)) {
    names.push_back(As<std::string>(&name, wrong, status));
  }
  return names;
}

OptimizerGroup GroupOf(const Json& json, absl::Status& status) {
  Members members(&json, "a group", status);
  OptimizerGroup group;
  const Json* const options = members.Take("options");
  auto parsed = OptionsFromJson(options == nullptr ? Json() : *options);
  status.Update(parsed.status());
  if (parsed.ok()) group.options = *std::move(parsed);
  group.names = NamesOf(members.Take("parameters"), "\"parameters\"", status);
  return group;
}

void ParseOptimizer(const Json& json, TrainingRecord& record,
                    absl::Status& status) {
  Members members(&json, "the optimizer", status);
  record.groups.emplace();
  for (const Json& one : ListOf(members.Take("groups"), "\"groups\"", status)) {
    record.groups->push_back(GroupOf(one, status));
  }
  record.slots = NamesOf(members.Take("slots"), "\"slots\"", status);
  const std::string wrong = "\"numbers\" has what is no number of a parameter";
  for (const auto& [parameter, numbers] :
       As<Json::Object>(members.Take("numbers"), wrong, status)) {
    for (const auto& [name, value] :
         As<Json::Object>(&numbers, wrong, status)) {
      record.numbers[parameter][name] = As<int64_t>(&value, wrong, status);
    }
  }
}

float MetricOf(const Json* json, absl::Status& status) {
  for (const float other : {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
    if (json != nullptr && *json == Metric(other)) return other;
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double metric = json == nullptr ? nan : json->NumberOr(nan);
  if (std::isnan(metric)) {
    status.Update(Bad("\"best\" of a scheduler is no number"));
  }
  return static_cast<float>(metric);
}

PlateauState PlateauOf(const Json& json, absl::Status& status) {
  Members members(&json, "a scheduler", status);
  PlateauState state;
  state.best = MetricOf(members.Take("best"), status);
  state.last_epoch = members.TakeSmallCount("last_epoch");
  state.bad_epochs = members.TakeSmallCount("bad_epochs");
  state.cooldown = members.TakeSmallCount("cooldown");
  return state;
}

GradScalerState ScalerOf(const Json& json, absl::Status& status) {
  Members members(&json, "the scaler", status);
  GradScalerState state{};
  if (const Json* const scale = members.Take("scale")) {
    state.scale = static_cast<float>(scale->NumberOr(0));
  }
  if (!(state.scale > 0)) {
    status.Update(Bad("the scale of the scaler is not positive"));
  }
  state.growth_tracker = members.TakeSmallCount("growth_tracker");
  return state;
}

void ParseRecord(const Json& json, TrainingRecord& record,
                 absl::Status& status) {
  Members members(&json, "it", status);
  const Json* const format = members.Take("format");
  if (format == nullptr || !(*format == Json(kFormat))) {
    status.Update(Bad("it does not say that it is one"));
  }
  const int64_t version = members.TakeCount("version");
  if (version != kVersion) {
    status.Update(Bad(absl::StrCat(
        "version ", version, ", where this library knows version ", kVersion)));
  }
  record.step = members.TakeCount("step");
  record.world_size = members.TakeSmallCount("world_size");
  if (const Json* const optimizer = members.Take("optimizer")) {
    ParseOptimizer(*optimizer, record, status);
  }
  for (const Json& steps :
       ListOf(members.Take("scheduler_steps"), "\"scheduler_steps\"", status)) {
    record.scheduler_steps.push_back(
        CountOf(&steps, std::numeric_limits<uint32_t>::max(),
                "\"scheduler_steps\" has what is no count", status));
  }
  if (const Json* const settings = members.Take("scheduler_settings")) {
    record.scheduler_settings =
        NamesOf(settings, "\"scheduler_settings\"", status);
  }
  for (const Json& one :
       ListOf(members.Take("plateaus"), "\"plateaus\"", status)) {
    record.plateaus.push_back(PlateauOf(one, status));
  }
  if (const Json* const scaler = members.Take("scaler")) {
    record.scaler = ScalerOf(*scaler, status);
  }
  const Json* const average = members.Take("average");
  if (average != nullptr) {
    record.average =
        As<bool>(average, "\"average\" is neither true nor false", status);
  }
  for (const auto& [name, text] : As<Json::Object>(
           members.Take("entries"), "\"entries\" are no object", status)) {
    record.entries[name] = As<std::string>(
        &text, absl::StrCat("\"entries\": \"", name, "\" is no text"), status);
  }
}

}  // namespace

TrainingRecord RecordOf(const TrainingRun& run,
                        const OptimizerValues* optimizer, int64_t step,
                        int world_size) {
  TrainingRecord record;
  record.step = step;
  record.world_size = world_size;
  if (optimizer != nullptr) {
    record.groups = optimizer->groups;
    std::set<std::string> names;
    for (const auto& [parameter, slots] : optimizer->slots) {
      record.numbers[parameter] = slots.numbers;
      for (const auto& [name, tensor] : slots.tensors) names.insert(name);
    }
    record.slots.assign(names.begin(), names.end());
  }
  for (const torch::optim::LRScheduler* scheduler : run.schedulers) {
    record.scheduler_steps.push_back(StepsOf(*scheduler));
    record.scheduler_settings.push_back(SettingsOf(*scheduler));
  }
  for (const auto* scheduler : run.plateau_schedulers) {
    record.plateaus.push_back(StateOf(*scheduler));
  }
  if (run.scaler != nullptr) record.scaler = run.scaler->state();
  if (run.average != nullptr) record.average = run.average->has_begun();
  record.entries = run.entries;
  return record;
}

absl::StatusOr<std::string> ToText(const TrainingRecord& record) {
  for (const auto& [name, text] : record.entries) {
    if (IsUtf8(name) && IsUtf8(text)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("TrainingRun::entries: \"", absl::CHexEscape(name),
                     "\" is not UTF-8: encode bytes, for example as hex"));
  }
  if (record.scaler.has_value() && !std::isfinite(record.scaler->scale)) {
    return absl::InvalidArgumentError(
        "the scale of the gradient scaler is not finite");
  }
  Json::Object object = {{"format", kFormat},
                         {"version", kVersion},
                         {"step", record.step},
                         {"world_size", record.world_size}};
  if (record.groups.has_value()) {
    FSDP_ASSIGN_OR_RETURN(Json groups, Groups(*record.groups));
    object.emplace_back("optimizer", Json::Object{{"groups", std::move(groups)},
                                                  {"slots", record.slots},
                                                  {"numbers", record.numbers}});
  }
  object.emplace_back("scheduler_steps", record.scheduler_steps);
  object.emplace_back("scheduler_settings", record.scheduler_settings);
  object.emplace_back("plateaus", Plateaus(record.plateaus));
  if (record.scaler.has_value()) {
    object.emplace_back(
        "scaler",
        Json::Object{{"scale", static_cast<double>(record.scaler->scale)},
                     {"growth_tracker", record.scaler->growth_tracker}});
  }
  if (record.average.has_value()) {
    object.emplace_back("average", *record.average);
  }
  object.emplace_back("entries", record.entries);
  return absl::StrCat(Json(std::move(object)).ToString(), "\n");
}

absl::StatusOr<TrainingRecord> ParseTraining(absl::string_view text) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  TrainingRecord record;
  absl::Status status;
  ParseRecord(json, record, status);
  FSDP_RETURN_IF_ERROR(status);
  return record;
}

absl::Status CheckFits(const TrainingRecord& record, const TrainingRun& run) {
  const auto differ = [](absl::string_view what, size_t saved, size_t here) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint has ", saved, " ", what, ", this run has ",
                     here, ": make them as they were when it was saved"));
  };
  if (run.schedulers.size() != record.scheduler_steps.size()) {
    return differ("schedulers of learning rates", record.scheduler_steps.size(),
                  run.schedulers.size());
  }
  if (run.plateau_schedulers.size() != record.plateaus.size()) {
    return differ("ReduceLROnPlateau schedulers", record.plateaus.size(),
                  run.plateau_schedulers.size());
  }
  const struct {
    bool lacks;
    absl::string_view what;
    absl::string_view member;
  } parts[] = {{run.scaler != nullptr && !record.scaler.has_value(),
                "state of a gradient scaler", "scaler"},
               {run.average != nullptr && !record.average.has_value(),
                "average of the weights", "average"},
               {run.optimizer != nullptr && !record.groups.has_value(),
                "state of an optimizer", "optimizer"}};
  for (const auto& part : parts) {
    if (!part.lacks) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint has no ", part.what,
                     ": load it with TrainingRun::", part.member, " null"));
  }
  return absl::OkStatus();
}

void WarnOfSettings(const TrainingRecord& record, const TrainingRun& run) {
  const size_t count =
      std::min(record.scheduler_settings.size(), run.schedulers.size());
  for (size_t i = 0; i < count; ++i) {
    const std::string here = SettingsOf(*run.schedulers[i]);
    if (here == record.scheduler_settings[i]) continue;
    TORCH_WARN("fsdp: scheduler ", i, " of the checkpoint was \"",
               record.scheduler_settings[i], "\", and this run's is \"", here,
               "\", which counts from here on");
  }
}

absl::Status Restore(const TrainingRecord& record, TrainingRun& run) {
  if (run.scaler != nullptr) {
    FSDP_RETURN_IF_ERROR(run.scaler->SetState(*record.scaler));
  }
  for (size_t i = 0; i < run.schedulers.size(); ++i) {
    SetSteps(*run.schedulers[i], record.scheduler_steps[i]);
  }
  for (size_t i = 0; i < run.plateau_schedulers.size(); ++i) {
    SetState(*run.plateau_schedulers[i], record.plateaus[i]);
  }
  // Such an average was saved as the parameters.
  if (run.average != nullptr && !*record.average) run.average->Forget();
  run.entries = record.entries;
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
