#include "checkpoint/load/dcp_record.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/run/optimizer_options.h"
#include "fsdp/state/optimizer_slots.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {
namespace {

using Options = std::map<std::string, Json>;

// Of groups in PyTorch: how a step is carried out, and what schedulers keep
// there for themselves.
bool IsWithoutEffect(const std::string& key) {
  static const auto* const keys = new std::set<std::string>{
      "foreach",     "fused",         "capturable",   "differentiable",
      "param_names", "initial_lr",    "max_lr",       "min_lr",
      "swa_lr",      "base_momentum", "max_momentum",
  };
  return keys->count(key) > 0;
}

// False, None, 0.
bool IsOff(const Json& json) {
  return json == Json() || json == Json(false) || json.NumberOr(1) == 0;
}

bool IsFinite(const Json& json) {
  if (const auto* const items = json.As<Json::Array>()) {
    for (const Json& item : *items) {
      if (!IsFinite(item)) return false;
    }
  }
  return std::isfinite(json.NumberOr(0));
}

std::string ClassOf(const Json& options) {
  const Json* const name = options.Find("class");
  return name == nullptr ? "" : *name->As<std::string>();
}

// Those without which a step of a parameter that has any would fail.
std::vector<std::string> NeededStates(const Json& options) {
  const auto has = [&options](const char* key) {
    const Json* const value = options.Find(key);
    return value != nullptr && !IsOff(*value);
  };
  const std::string name = ClassOf(options);
  std::vector<std::string> needed;
  if (name == "Adam" || name == "AdamW") {
    needed = {"step", "exp_avg", "exp_avg_sq"};
    if (has("amsgrad")) needed.emplace_back("max_exp_avg_sq");
  } else if (name == "Adagrad") {
    needed = {"step", "sum"};
  } else if (name == "RMSprop") {
    needed = {"step", "square_avg"};
    if (has("momentum")) needed.emplace_back("momentum_buffer");
    if (has("centered")) needed.emplace_back("grad_avg");
  }
  return needed;
}

// Of one group.
class OptionsTranslator {
 public:
  // All outlive it. `own`: options of the optimizer here. `what`: the group.
  OptionsTranslator(const Json& own, bool strict, const std::string& what,
                    std::vector<std::string>& problems)
      : own_(own), strict_(strict), what_(what), problems_(problems) {}

  // What is refused is noted; null where nothing can be made of the others.
  std::shared_ptr<const torch::optim::OptimizerOptions> Translate(
      const Options& options) {
    Json::Object known = {{"class", ClassOf(own_)}};
    const size_t members = own_.As<Json::Object>()->size();
    for (const auto& [key, value] : *own_.As<Json::Object>()) {
      if (key == "class") continue;
      const auto found = options.find(key);
      if (found == options.end()) {
        Refuse(key, "missing");
      } else if (!IsFinite(found->second)) {
        Refuse(key, "is not finite");
      } else {
        known.emplace_back(key, found->second);
      }
    }
    for (const auto& [key, value] : options) {
      if (own_.Find(key) == nullptr) CheckOther(key, value);
    }
    if (known.size() < members) return nullptr;
    absl::StatusOr<std::unique_ptr<torch::optim::OptimizerOptions>> made =
        OptionsFromJson(Json(std::move(known)));
    if (made.ok()) return *std::move(made);
    problems_.push_back(absl::StrCat(what_, ": ", made.status().message()));
    return nullptr;
  }

 private:
  void Refuse(const std::string& key, absl::string_view why) {
    problems_.push_back(absl::StrCat(what_, ".", key, ": ", why));
  }

  // An option that LibTorch's class lacks.
  void CheckOther(const std::string& key, const Json& value) {
    const std::string name = ClassOf(own_);
    if (IsWithoutEffect(key)) return;
    if (key == "maximize" && IsOff(value)) return;
    if (key == "decoupled_weight_decay") {
      const bool is_decoupled = !IsOff(value);
      if (is_decoupled == (name == "AdamW")) return;
      return Refuse(
          key, absl::StrCat("is that of ", is_decoupled ? "AdamW" : "Adam"));
    }
    if (key != "maximize" && !strict_) return;
    Refuse(key, absl::StrCat("LibTorch's ", name, " has no such option",
                             key == "maximize"
                                 ? ""
                                 : "; load without `strict` to leave it out"));
  }

  const Json& own_;
  const bool strict_;
  const std::string& what_;
  std::vector<std::string>& problems_;
};

class Translator {
 public:
  Translator(const DcpOptimizer& stored, const RunValues& values,
             const torch::optim::Optimizer& optimizer, bool strict)
      : stored_(stored),
        aliases_(values.model().aliases),
        groups_(values.optimizer()->groups),
        optimizer_(optimizer),
        strict_(strict) {}

  absl::StatusOr<TrainingRecord> Run() && {
    if (stored_.slots.empty() && stored_.numbers.empty() &&
        stored_.groups.empty()) {
      return absl::InvalidArgumentError(
          "has no states of an optimizer: load the model alone, by LoadModel() "
          "or with TrainingRun::optimizer null");
    }
    if (groups_.empty()) {
      return absl::InvalidArgumentError("the run's optimizer has no groups");
    }
    FSDP_ASSIGN_OR_RETURN(own_, OptionsToJson(*groups_.front().options));
    for (const auto& [name, catalog] : stored_.slots) {
      record_.slots.push_back(name);
    }
    record_.numbers = stored_.numbers;
    CheckNames();
    // Of another class all else is wrong, too.
    if (problems_.empty()) {
      TranslateGroups();
      FSDP_RETURN_IF_ERROR(CheckComplete());
    }
    if (problems_.empty()) return std::move(record_);
    return absl::InvalidArgumentError(absl::StrCat(
        "the optimizer of the files does not fit this one, of the class ",
        ClassOf(own_), ", which is as before:\n  ",
        absl::StrJoin(problems_, "\n  ")));
  }

 private:
  template <typename... Parts>
  void Problem(const Parts&... parts) {
    problems_.push_back(absl::StrCat(parts...));
  }

  // What the model calls it.
  const std::string& FirstName(const std::string& name) const {
    const auto alias = aliases_.find(name);
    return alias == aliases_.end() ? name : alias->second;
  }

  // --- States ---------------------------------------------------------------

  void CheckNames() {
    std::vector<OptimizerSlots> all;
    for (const auto& [name, catalog] : stored_.slots) {
      all.emplace_back().tensors[name] = at::Tensor();
    }
    std::set<std::string> numbers;
    for (const auto& [parameter, of_parameter] : stored_.numbers) {
      for (const auto& [name, number] : of_parameter) numbers.insert(name);
    }
    for (const std::string& name : numbers) {
      all.emplace_back().numbers[name] = 0;
    }
    for (const OptimizerSlots& one : all) {
      const absl::Status status = MakeState(optimizer_, one).status();
      if (!status.ok()) Problem(status.message());
    }
  }

  absl::Status CheckComplete() {
    std::map<std::string, std::set<std::string>> states;
    for (const auto& [slot, catalog] : stored_.slots) {
      for (const StoredTensor& tensor : catalog.tensors()) {
        states[FirstName(tensor.info.name)].insert(slot);
      }
    }
    for (const auto& [parameter, numbers] : stored_.numbers) {
      for (const auto& [name, number] : numbers) {
        states[FirstName(parameter)].insert(name);
      }
    }
    for (const OptimizerGroup& group : *record_.groups) {
      FSDP_ASSIGN_OR_RETURN(const Json options, OptionsToJson(*group.options));
      const std::vector<std::string> needed = NeededStates(options);
      for (const std::string& parameter : group.names) {
        const auto found = states.find(FirstName(parameter));
        // Without any it has not been stepped yet.
        if (found == states.end()) continue;
        for (const std::string& name : needed) {
          if (found->second.count(name) > 0) continue;
          Problem("missing: ", name, " of ", parameter);
        }
      }
    }
    return absl::OkStatus();
  }

  // --- Groups ---------------------------------------------------------------

  void TranslateGroups() {
    record_.groups.emplace();
    if (stored_.groups.empty()) {
      if (strict_) Problem("missing: param_groups");
      record_.groups = groups_;
    } else if (stored_.is_flattened) {
      Unflatten();
    } else {
      for (size_t i = 0; i < stored_.groups.size(); ++i) {
        const DcpGroup& group = stored_.groups[i];
        AddGroup(absl::StrCat("param_groups.", i), group.options, group.names);
      }
    }
  }

  // Groups as they are here, of what each of their parameters has.
  void Unflatten() {
    std::map<std::string, const DcpGroup*> found;
    for (const DcpGroup& group : stored_.groups) {
      found[FirstName(group.names.front())] = &group;
    }
    for (const OptimizerGroup& group : groups_) {
      const DcpGroup* first = nullptr;
      for (const std::string& name : group.names) {
        const auto one = found.find(name);
        if (one == found.end()) {
          if (strict_) Problem("missing: param_groups.", name);
          continue;
        }
        if (first == nullptr) first = one->second;
        CheckAlike(*first, *one->second);
        found.erase(one);
      }
      if (first == nullptr) {
        record_.groups->push_back(group);
      } else {
        AddGroup(absl::StrCat("param_groups.", first->names.front()),
                 first->options, group.names);
      }
    }
    if (!strict_) return;
    for (const auto& [name, group] : found) {
      Problem("unexpected: param_groups.", name);
    }
  }

  void CheckAlike(const DcpGroup& a, const DcpGroup& b) {
    if (a.options == b.options) return;
    Problem("param_groups.", b.names.front(), ": has other options than ",
            a.names.front(), ", with which it is in one group here");
  }

  void AddGroup(const std::string& what, const Options& options,
                const std::vector<std::string>& names) {
    OptimizerGroup group;
    group.names = names;
    group.options =
        OptionsTranslator(own_, strict_, what, problems_).Translate(options);
    // What is refused is not looked at any more.
    if (group.options == nullptr) group.options = groups_.front().options;
    record_.groups->push_back(std::move(group));
  }

  const DcpOptimizer& stored_;
  const std::map<std::string, std::string>& aliases_;
  const std::vector<OptimizerGroup>& groups_;
  const torch::optim::Optimizer& optimizer_;
  const bool strict_;
  Json own_;  // options of the optimizer
  TrainingRecord record_;
  std::vector<std::string> problems_;
};

}  // namespace

absl::StatusOr<TrainingRecord> RecordOfDcp(
    const DcpOptimizer& stored, const RunValues& values,
    const torch::optim::Optimizer& optimizer, bool strict) {
  return Translator(stored, values, optimizer, strict).Run();
}

}  // namespace fsdp::checkpoint
