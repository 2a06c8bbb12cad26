#include "fsdp/testing/program/program.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "fsdp/schedule/testing/choices.h"

namespace fsdp::testing {
namespace {

using Texts = std::vector<absl::string_view>;

class FieldList {
 public:
  void Int(absl::string_view name, int* value, int plain, int low, int high,
           int percent) {
    fields_.push_back(
        {absl::StrCat(prefix_, name), value, plain, low, high, percent, {}});
  }
  void Flag(absl::string_view name, int* value, int percent) {
    Int(name, value, 0, 1, 1, percent);
  }
  // Adds a field that is on by default.
  void On(absl::string_view name, int* value, int percent_off) {
    Int(name, value, 1, 0, 0, percent_off);
  }
  // The first text is the plain one.
  void Choice(absl::string_view name, int* value, int percent, Texts texts) {
    fields_.push_back({absl::StrCat(prefix_, name), value, 0, 0,
                       static_cast<int>(texts.size()) - 1, percent,
                       std::move(texts)});
  }
  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }
  std::vector<Field> Take() { return std::move(fields_); }

 private:
  std::string prefix_;
  std::vector<Field> fields_;
};

const Texts& CallTexts() {
  static const auto* const texts =
      new Texts{"none",           "look",
                "rebuild",        "eval",
                "inference_eval", "measure",
                "lost_forward",   "state_dict",
                "save",           "inference_summon",
                "unshard",        "summon",
                "visit",          "load",
                "snapshot",       "restore",
                "new_optimizer",  "toggle",
                "write_shards",   "restart"};
  return *texts;
}

void AddGroup(Program& p, FieldList& list) {
  list.Int("ranks", &p.ranks, 2, 1, 4, 90);
  list.Choice("group", &p.group, 90,
              {"local", "shared", "gloo", "shared_hosts", "local_hosts"});
  list.Int("rows", &p.rows, 0, 1, 2, 40);
  list.Int("hosts", &p.hosts, 0, 1, 2, 80);
  list.Int("late", &p.late, 0, 1, 4, 60);
  list.Int("yields", &p.yields, 2, 2, 4, 50);
  list.Int("salt", &p.salt, 0, 0, 1000, 100);
}

void AddModel(Program& p, FieldList& list) {
  list.Choice(
      "precision", &p.precision, 55,
      {"double", "float", "compute_float", "compute_bf16", "compute_fp16"});
  list.On("exact_reduce", &p.exact_reduce, 30);
  list.Int("dim", &p.dim, 4, 2, 7, 80);
  list.Int("units", &p.num_units, 1, 1, Program::kMaxUnits, 90);
  list.Choice("tied", &p.tied, 25,
              {"no", "tied", "head_frozen", "embedding_frozen"});
  list.Flag("bare", &p.bare, 8);
  list.Flag("writes_input", &p.writes_input, 12);
  list.Flag("input_grad", &p.input_grad, 20);
  list.Flag("deferred", &p.deferred, 15);
  list.Flag("transparent", &p.transparent, 15);
  list.Flag("wrap_linear", &p.wrap_linear, 40);
  list.Flag("no_wrap", &p.no_wrap, 5);
}

void AddUnit(ProgramUnit& u, FieldList& list) {
  list.Int("hidden", &u.hidden, 3, 1, 9, 80);
  list.On("bias", &u.bias, 25);
  list.Flag("checkpoint", &u.checkpoint, 20);
  list.Flag("twice", &u.twice, 12);
  list.Flag("scale", &u.scale, 25);
  list.Flag("unused", &u.unused, 12);
  list.Flag("sometimes", &u.sometimes, 25);
  list.Flag("counter", &u.counter, 15);
  list.Flag("layer_norm", &u.layer_norm, 20);
  list.Flag("batch_norm", &u.batch_norm, 20);
  list.Flag("child", &u.child, 20);
  list.Choice("frozen", &u.frozen, 25, {"no", "weight", "all"});
  list.Flag("empty", &u.empty, 8);
  list.Choice("outputs", &u.outputs, 40,
              {"one", "unused", "sometimes", "hooked", "view", "written"});
  list.Choice("hook", &u.hook, 20, {"no", "before", "after"});
  list.Flag("writes_input", &u.writes_input, 12);
  list.Choice("strategy", &u.strategy, 40,
              {"same", "full_shard", "shard_grad_op", "shard_optimizer",
               "no_shard", "hybrid_shard", "hybrid_shard_grad_op"});
  list.Int("skipped_in", &u.skipped_in, 0, 1, 4, 15);
  list.Flag("recompute", &u.recompute, 20);
}

void AddSharding(Program& p, FieldList& list) {
  list.Choice("strategy", &p.strategy, 80,
              {"full_shard", "shard_grad_op", "shard_optimizer", "no_shard",
               "hybrid_shard", "hybrid_shard_grad_op"});
  list.Int("backward_group", &p.backward_group, 0, 1, 4, 30);
  list.On("share_memory", &p.share_memory, 25);
  list.Flag("reshard_root", &p.reshard_root, 30);
  list.On("forward_prefetch", &p.forward_prefetch, 25);
  list.On("backward_prefetch", &p.backward_prefetch, 25);
  list.On("check_order", &p.check_order, 25);
  list.Int("divide", &p.divide, 0, 1, 2, 30);
  list.Int("predivide", &p.predivide, 0, 1, 2, 30);
  list.Flag("quantize_gather", &p.quantize_gather, 4);
  list.Flag("quantize_reduce", &p.quantize_reduce, 4);
  list.Flag("low_precision_gradients", &p.low_precision_gradients, 20);
  list.Flag("rest_parameters", &p.rest_parameters, 30);
  list.Flag("rest_gradients", &p.rest_gradients, 25);
  list.Flag("rest_states", &p.rest_states, 30);
  list.Int("budget", &p.budget, 0, 40'000, 200'000, 30);
  list.Flag("keep", &p.keep, 30);
  list.On("rollback", &p.rollback, 30);
  list.Flag("big_blocks", &p.big_blocks, 30);
  list.Int("distance", &p.distance, 2, 0, 3, 70);
  list.Flag("offload_activations", &p.offload_activations, 30);
}

void AddTraining(Program& p, FieldList& list) {
  list.Choice("optimizer", &p.optimizer, 80,
              {"sgd", "adamw", "adam", "adagrad", "rmsprop"});
  list.Flag("fused", &p.fused, 50);
  list.Int("groups", &p.groups, 1, 2, 3, 50);
  list.Flag("two_optimizers", &p.two_optimizers, 25);
  list.Flag("omits", &p.omits, 10);
  list.Flag("in_backward", &p.in_backward, 20);
  list.Flag("amsgrad", &p.amsgrad, 30);
  list.Flag("weight_decay", &p.weight_decay, 40);
  list.On("momentum", &p.momentum, 40);
  list.Flag("nesterov", &p.nesterov, 30);
  list.Choice("zero", &p.zero, 75,
              {"model", "model_to_zero", "optimizers", "optimizers_to_zero"});
  list.Flag("clip", &p.clip, 30);
  list.Int("norm", &p.norm, 2, 1, 3, 60);
  list.Flag("scaler", &p.scaler, 25);
  list.Int("infinite_in", &p.infinite_in, 0, 1, 4, 40);
  list.Flag("halve_gradients", &p.halve_gradients, 12);
  list.Flag("new_rates", &p.new_rates, 30);
  list.Int("steps", &p.num_steps, 2, 1, Program::kMaxSteps, 90);
  list.Int("micro", &p.micro, 1, 2, 3, 60);
  list.Flag("no_sync", &p.no_sync, 50);
  list.On("compare_each", &p.compare_each, 40);
}

void AddStep(ProgramStep& s, FieldList& list) {
  const Texts& calls = CallTexts();
  const Texts harmless(calls.begin(), calls.begin() + kLastHarmless + 1);
  list.Choice("before", &s.before[0], 50, calls);
  list.Choice("before_too", &s.before[1], 20, calls);
  list.Choice("between", &s.between[0], 25, harmless);
  list.Choice("between_too", &s.between[1], 25, harmless);
  list.Choice(
      "style", &s.style, 50,
      {"plain", "forwards_first", "forwards_first_reversed", "retain",
       "lost_backward", "failed_forward", "failed_backward", "fail_between",
       "state_dict_between", "eval_between", "one_loss"});
  list.Int("hold", &s.hold, 0, 1, (1 << Program::kMaxUnits) - 1, 20);
  list.On("hold_waits", &s.hold_waits, 30);
  list.Flag("hold_evals", &s.hold_evals, 50);
}

// These are drawn after all others, so that seeds keep what they mean.
void AddLaterFeatures(Program& p, bool all, FieldList& list) {
  list.Choice("regions", &p.regions, 15, {"no", "each", "all", "nested"});
  list.Int("kept", &p.kept, 0, 1, 2, 20);
  list.Flag("inference", &p.inference, 15);
  for (int i = 0; i < (all ? Program::kMaxUnits : p.num_units); ++i) {
    list.set_prefix(absl::StrCat("unit", i, "."));
    list.Int("skipped_micro", &p.units[i].skipped_micro, 0, 1, 3, 8);
  }
}

}  // namespace

std::vector<Field> Fields(Program& program, bool all) {
  FieldList list;
  AddGroup(program, list);
  AddModel(program, list);
  AddSharding(program, list);
  AddTraining(program, list);
  for (int i = 0; i < (all ? Program::kMaxUnits : program.num_units); ++i) {
    list.set_prefix(absl::StrCat("unit", i, "."));
    AddUnit(program.units[i], list);
  }
  for (int i = 0; i < (all ? Program::kMaxSteps : program.num_steps); ++i) {
    list.set_prefix(absl::StrCat("step", i, "."));
    AddStep(program.steps[i], list);
  }
  list.set_prefix("");
  AddLaterFeatures(program, all, list);
  return list.Take();
}

Program PlainProgram() {
  Program program;
  for (const Field& field : Fields(program, /*all=*/true)) {
    *field.value = field.plain;
  }
  return program;
}

Program DrawProgram(uint32_t seed, const DrawOptions& options) {
  Program program;
  SeededChoices choices(seed);
  for (const Field& field : Fields(program, /*all=*/true)) {
    // Draws both for every field, so that a field that is off changes no other.
    const bool drawn = choices.Chance(field.percent);
    const int value = choices.Between(field.low, field.high);
    *field.value =
        drawn && options.off.count(field.name) == 0 ? value : field.plain;
    const auto set = options.set.find(field.name);
    if (set != options.set.end()) *field.value = set->second;
  }
  if (program.transparent && !options.held) {
    for (ProgramUnit& unit : program.units) unit.checkpoint = 0;
    program.regions = kNoRegions;
  }
  MakeValid(program);
  return program;
}

std::string ToString(const Program& program) {
  Program copy = program;
  std::string text;
  for (const Field& field : Fields(copy, /*all=*/false)) {
    if (*field.value == field.plain) continue;
    absl::StrAppend(&text, text.empty() ? "" : " ", field.name, "=");
    if (field.texts.empty()) {
      absl::StrAppend(&text, *field.value);
    } else {
      absl::StrAppend(&text, field.texts[*field.value]);
    }
  }
  return text;
}

absl::StatusOr<std::map<std::string, int>> ParseSettings(
    absl::string_view text) {
  Program unused;
  const std::vector<Field> fields = Fields(unused, /*all=*/true);
  std::map<std::string, int> settings;
  for (const absl::string_view part :
       absl::StrSplit(text, absl::ByAnyChar(" ,"), absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(part, absl::MaxSplits('=', 1));
    const auto field =
        std::find_if(fields.begin(), fields.end(),
                     [&](const Field& f) { return f.name == pair.first; });
    if (field == fields.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("no feature has the name of \"", part, "\""));
    }
    const Texts& texts = field->texts;
    const auto found = std::find(texts.begin(), texts.end(), pair.second);
    int value = static_cast<int>(found - texts.begin());
    const bool is_text = found != texts.end();
    if (!is_text && !absl::SimpleAtoi(pair.second, &value)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", part, "\" has no value that ", pair.first, " can have"));
    }
    const int low = std::min(field->low, field->plain);
    const int high = std::max(field->high, field->plain);
    if (value < low || value > high) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", part, "\": ", pair.first, " is ", low, " to ", high));
    }
    settings[field->name] = value;
  }
  return settings;
}

absl::StatusOr<Program> ParseProgram(absl::string_view text) {
  FSDP_ASSIGN_OR_RETURN(const auto settings, ParseSettings(text));
  Program program = PlainProgram();
  for (const Field& field : Fields(program, /*all=*/true)) {
    const auto set = settings.find(field.name);
    if (set != settings.end()) *field.value = set->second;
  }
  MakeValid(program);
  return program;
}

}  // namespace fsdp::testing
