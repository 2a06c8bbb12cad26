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

// Null if there is no member, or it is of another type.
template <typename T>
const T* As(const Json* member) {
  return member == nullptr ? nullptr : member->As<T>();
}

// The members of an object, each of which is asked for once.
class Members {
 public:
  static absl::StatusOr<Members> Of(const Json& json, absl::string_view what) {
    const auto* const object = json.As<Json::Object>();
    if (object == nullptr) return Bad(absl::StrCat(what, " is no object"));
    return Members(*object);
  }

  // Null where there is none.
  const Json* Take(absl::string_view name) {
    for (const auto& [key, value] : *object_) {
      if (key != name) continue;
      ++taken_;
      return &value;
    }
    return nullptr;
  }

  absl::StatusOr<int64_t> TakeCount(absl::string_view name) {
    const auto* const number = As<int64_t>(Take(name));
    if (number == nullptr || *number < 0) {
      return Bad(absl::StrCat("\"", name, "\" is no count"));
    }
    return *number;
  }

  // Of 32 bits.
  absl::StatusOr<int64_t> TakeSmallCount(absl::string_view name) {
    FSDP_ASSIGN_OR_RETURN(const int64_t count, TakeCount(name));
    if (count > std::numeric_limits<int32_t>::max()) {
      return Bad(absl::StrCat("\"", name, "\" is too large"));
    }
    return count;
  }

  absl::Status Finish(absl::string_view what) const {
    if (taken_ == object_->size()) return absl::OkStatus();
    return Bad(absl::StrCat(what,
                            " has members that this version of the "
                            "library does not know"));
  }

 private:
  explicit Members(const Json::Object& object) : object_(&object) {}

  const Json::Object* object_;
  size_t taken_ = 0;
};

absl::Status ParseTexts(const Json* json, absl::string_view what,
                        std::map<std::string, std::string>* texts) {
  const auto* const object = As<Json::Object>(json);
  if (object == nullptr) return Bad(absl::StrCat(what, " are no object"));
  for (const auto& [name, value] : *object) {
    const auto* const text = value.As<std::string>();
    if (text == nullptr) {
      return Bad(absl::StrCat(what, ": \"", name, "\" is no text"));
    }
    (*texts)[name] = *text;
  }
  return absl::OkStatus();
}

absl::Status ParseNumbers(const Json* json, TrainingRecord* record) {
  const auto* const object = As<Json::Object>(json);
  if (object == nullptr) return Bad("\"numbers\" are no object");
  for (const auto& [parameter, of_parameter] : *object) {
    const auto* const numbers = of_parameter.As<Json::Object>();
    if (numbers == nullptr) {
      return Bad(absl::StrCat("the numbers of ", parameter, " are no object"));
    }
    for (const auto& [name, value] : *numbers) {
      const auto* const number = value.As<int64_t>();
      if (number == nullptr) {
        return Bad(absl::StrCat(parameter, ".", name, " is no whole number"));
      }
      record->numbers[parameter][name] = *number;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ParseNames(const Json* json,
                                                    absl::string_view what) {
  const auto* const array = As<Json::Array>(json);
  if (array == nullptr) return Bad(absl::StrCat(what, " is no list"));
  std::vector<std::string> names;
  for (const Json& name : *array) {
    const auto* const text = name.As<std::string>();
    if (text == nullptr) return Bad(absl::StrCat(what, " has what is no text"));
    names.push_back(*text);
  }
  return names;
}

absl::StatusOr<OptimizerGroup> ParseGroup(const Json& json) {
  FSDP_ASSIGN_OR_RETURN(Members members, Members::Of(json, "a group"));
  OptimizerGroup group;
  const Json* const options = members.Take("options");
  if (options == nullptr) return Bad("a group has no options");
  FSDP_ASSIGN_OR_RETURN(group.options, OptionsFromJson(*options));
  FSDP_ASSIGN_OR_RETURN(
      group.names, ParseNames(members.Take("parameters"), "\"parameters\""));
  FSDP_RETURN_IF_ERROR(members.Finish("a group"));
  return group;
}

absl::Status ParseOptimizer(const Json& json, TrainingRecord* record) {
  FSDP_ASSIGN_OR_RETURN(Members members, Members::Of(json, "\"optimizer\""));
  const auto* const array = As<Json::Array>(members.Take("groups"));
  if (array == nullptr) return Bad("the optimizer has no list of groups");
  record->groups.emplace();
  for (const Json& one : *array) {
    FSDP_ASSIGN_OR_RETURN(OptimizerGroup group, ParseGroup(one));
    record->groups->push_back(std::move(group));
  }
  FSDP_ASSIGN_OR_RETURN(record->slots,
                        ParseNames(members.Take("slots"), "\"slots\""));
  FSDP_RETURN_IF_ERROR(ParseNumbers(members.Take("numbers"), record));
  return members.Finish("the optimizer");
}

absl::StatusOr<float> ParseMetric(const Json* json) {
  if (json != nullptr) {
    if (json->As<double>() != nullptr || json->As<int64_t>() != nullptr) {
      return static_cast<float>(json->NumberOr(0));
    }
    if (const auto* const text = json->As<std::string>()) {
      if (*text == "inf") return std::numeric_limits<float>::infinity();
      if (*text == "-inf") return -std::numeric_limits<float>::infinity();
      if (*text == "nan") return std::numeric_limits<float>::quiet_NaN();
    }
  }
  return Bad("\"best\" of a scheduler is no number");
}

absl::Status ParsePlateaus(const Json* json, TrainingRecord* record) {
  const auto* const array = As<Json::Array>(json);
  if (array == nullptr) return Bad("\"plateaus\" is no list");
  for (const Json& one : *array) {
    FSDP_ASSIGN_OR_RETURN(Members members, Members::Of(one, "a scheduler"));
    PlateauState state;
    FSDP_ASSIGN_OR_RETURN(state.best, ParseMetric(members.Take("best")));
    FSDP_ASSIGN_OR_RETURN(state.last_epoch,
                          members.TakeSmallCount("last_epoch"));
    FSDP_ASSIGN_OR_RETURN(state.bad_epochs,
                          members.TakeSmallCount("bad_epochs"));
    FSDP_ASSIGN_OR_RETURN(state.cooldown, members.TakeSmallCount("cooldown"));
    FSDP_RETURN_IF_ERROR(members.Finish("a scheduler"));
    record->plateaus.push_back(state);
  }
  return absl::OkStatus();
}

absl::Status ParseSchedulers(const Json* json, TrainingRecord* record) {
  const auto* const array = As<Json::Array>(json);
  if (array == nullptr) return Bad("\"scheduler_steps\" is no list");
  for (const Json& one : *array) {
    const auto* const steps = one.As<int64_t>();
    if (steps == nullptr || *steps < 0 ||
        *steps > std::numeric_limits<uint32_t>::max()) {
      return Bad("\"scheduler_steps\" has what is no count");
    }
    record->scheduler_steps.push_back(*steps);
  }
  return absl::OkStatus();
}

absl::Status ParseScaler(const Json& json, TrainingRecord* record) {
  FSDP_ASSIGN_OR_RETURN(Members members, Members::Of(json, "\"scaler\""));
  GradScalerState& state = record->scaler.emplace();
  const Json* const scale = members.Take("scale");
  state.scale = scale == nullptr ? 0 : static_cast<float>(scale->NumberOr(0));
  if (!(state.scale > 0)) return Bad("the scale of the scaler is not positive");
  FSDP_ASSIGN_OR_RETURN(const int64_t tracker,
                        members.TakeSmallCount("growth_tracker"));
  state.growth_tracker = static_cast<int>(tracker);
  return members.Finish("the scaler");
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
  record.has_average = run.average != nullptr;
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
  if (record.has_average) object.emplace_back("average", true);
  object.emplace_back("entries", record.entries);
  return absl::StrCat(Json(std::move(object)).ToString(), "\n");
}

absl::StatusOr<TrainingRecord> ParseTraining(absl::string_view text) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  FSDP_ASSIGN_OR_RETURN(Members members, Members::Of(json, "it"));
  const Json* const format = members.Take("format");
  if (format == nullptr || !(*format == Json(kFormat))) {
    return Bad("it does not say that it is one");
  }
  FSDP_ASSIGN_OR_RETURN(const int64_t version, members.TakeCount("version"));
  if (version != kVersion) {
    return Bad(absl::StrCat("version ", version,
                            ", where this library knows version ", kVersion));
  }
  TrainingRecord record;
  FSDP_ASSIGN_OR_RETURN(record.step, members.TakeCount("step"));
  FSDP_ASSIGN_OR_RETURN(const int64_t ranks,
                        members.TakeSmallCount("world_size"));
  record.world_size = static_cast<int>(ranks);
  if (const Json* const optimizer = members.Take("optimizer")) {
    FSDP_RETURN_IF_ERROR(ParseOptimizer(*optimizer, &record));
  }
  FSDP_RETURN_IF_ERROR(
      ParseSchedulers(members.Take("scheduler_steps"), &record));
  if (const Json* const settings = members.Take("scheduler_settings")) {
    FSDP_ASSIGN_OR_RETURN(record.scheduler_settings,
                          ParseNames(settings, "\"scheduler_settings\""));
  }
  FSDP_RETURN_IF_ERROR(ParsePlateaus(members.Take("plateaus"), &record));
  if (const Json* const scaler = members.Take("scaler")) {
    FSDP_RETURN_IF_ERROR(ParseScaler(*scaler, &record));
  }
  const Json* const average = members.Take("average");
  record.has_average = average != nullptr && *average == Json(true);
  FSDP_RETURN_IF_ERROR(
      ParseTexts(members.Take("entries"), "\"entries\"", &record.entries));
  FSDP_RETURN_IF_ERROR(members.Finish("it"));
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
               {run.average != nullptr && !record.has_average,
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
  run.entries = record.entries;
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
