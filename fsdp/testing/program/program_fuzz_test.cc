// Compares training programs, sharded and plain: random ones for fixed seeds,
// and chosen ones.
// //fsdp/testing/program:program_fuzz runs others.
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"
#include "fsdp/testing/program/program_runner.h"
#include "fsdp/testing/program/sharded_program.h"

namespace fsdp::testing {
namespace {

TEST(ProgramFuzzTest, RandomProgramsGiveWhatPlainLibTorchGives) {
  FuzzOptions options;
  options.end = 150;
  options.max_failures = 1;
  const FuzzReport report = Fuzz(options, [](const Program& program) {
    return RunProgram(program, ::testing::TempDir());
  });
  for (const FuzzFailure& failure : report.failures) {
    ADD_FAILURE() << "seed " << failure.seed << ": " << failure.outcome.text
                  << "\n"
                  << ToString(failure.program);
  }
  // Programs that are refused show nothing.
  EXPECT_LT(report.refused, report.seeds / 10);
}

// Programs in ToString()'s form, one feature or a pair each. They run on 1, 2
// and 3 ranks, or as many as they say.
class KnownProgramTest : public ::testing::TestWithParam<const char*> {};

TEST_P(KnownProgramTest, GivesWhatPlainLibTorchGives) {
  const bool has_ranks = absl::StartsWith(GetParam(), "ranks=");
  const std::vector<std::string> all =
      has_ranks ? std::vector<std::string>{""}
                : std::vector<std::string>{"ranks=1 ", "", "ranks=3 "};
  for (const std::string& ranks : all) {
    const std::string text = absl::StrCat(ranks, GetParam());
    ASSERT_OK_AND_ASSIGN(const Program program, ParseProgram(text));
    ASSERT_EQ(ToString(program), text) << "a rule takes a feature back";
    const ProgramOutcome outcome = RunProgram(program, ::testing::TempDir());
    EXPECT_EQ(outcome.kind, ProgramOutcome::kSame)
        << text << ": " << outcome.text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Everything, KnownProgramTest,
    ::testing::Values(
        "units=3 forward_prefetch=0 backward_prefetch=0", "no_wrap=1",
        "units=2 unit0.twice=1", "units=2 bare=1 unit0.child=1 unit1.child=1",
        "units=2 unit0.outputs=view", "units=2 unit0.outputs=written",
        "units=2 unit0.outputs=unused",
        "units=2 unit0.outputs=unused unit0.recompute=1",
        "units=2 unit0.outputs=hooked",
        "units=2 unit0.outputs=hooked unit0.recompute=1",
        "units=2 unit0.checkpoint=1 unit0.batch_norm=1",
        "units=2 unit0.checkpoint=1 unit0.batch_norm=1 unit0.recompute=1",
        "units=2 weight_decay=1 unit0.unused=1 unit1.skipped_in=1",
        "units=2 step0.style=retain",
        "units=2 micro=2 step0.style=forwards_first",
        "units=2 micro=2 step0.style=forwards_first_reversed",
        "units=2 micro=2 no_sync=1 step0.style=one_loss",
        "units=3 input_grad=1 unit0.frozen=all unit1.frozen=weight "
        "unit2.frozen=all",
        "units=2 steps=4 step1.before=toggle step2.before=toggle "
        "step3.before=toggle",
        "units=2 tied=tied", "units=2 tied=head_frozen",
        "units=2 tied=embedding_frozen",
        "salt=1 units=2 tied=tied transparent=1 wrap_linear=1",
        "salt=1 units=2 tied=head_frozen transparent=1 wrap_linear=1",
        "salt=1 units=2 transparent=1 wrap_linear=1 unit0.child=1",
        "salt=1 units=2 transparent=1 unit0.layer_norm=1",
        "salt=1 units=2 transparent=1 wrap_linear=1 unit0.twice=1 "
        "unit0.scale=1 unit0.layer_norm=1",
        "salt=1 units=3 input_grad=1 transparent=1 wrap_linear=1 "
        "unit0.frozen=all unit1.frozen=weight unit2.frozen=all",
        "salt=1 units=2 transparent=1 wrap_linear=1 strategy=shard_grad_op",
        "salt=1 units=2 transparent=1 wrap_linear=1 strategy=shard_optimizer",
        "salt=1 units=2 transparent=1 wrap_linear=1 strategy=no_shard",
        "salt=1 units=3 transparent=1 wrap_linear=1 reshard_root=1 "
        "forward_prefetch=0 backward_prefetch=0",
        "salt=1 units=2 transparent=1 wrap_linear=1 step0.style=retain",
        "salt=1 units=2 transparent=1 wrap_linear=1 micro=2 "
        "step0.style=forwards_first",
        "salt=1 units=2 transparent=1 wrap_linear=1 micro=2 "
        "step0.style=forwards_first_reversed",
        "salt=1 units=2 transparent=1 wrap_linear=1 micro=2 "
        "step0.style=one_loss",
        "salt=1 units=2 transparent=1 wrap_linear=1 step0.before=eval "
        "step1.before=inference_eval",
        "units=2 optimizer=adamw fused=1", "units=2 fused=1 in_backward=1",
        "units=3 in_backward=1 micro=2 no_sync=1 unit0.frozen=weight "
        "unit1.twice=1 unit2.skipped_in=2",
        "units=3 optimizer=adamw in_backward=1 steps=3 micro=2 no_sync=1 "
        "unit1.twice=1 unit2.sometimes=1",
        "units=2 optimizer=adamw fused=1 two_optimizers=1 in_backward=1",
        "units=2 optimizer=adamw fused=1 scaler=1 infinite_in=2 steps=4",
        "units=2 clip=1 scaler=1 infinite_in=2 steps=3",
        "units=2 clip=1 norm=1 unit0.frozen=weight unit1.unused=1",
        "units=2 clip=1", "units=2 clip=1 norm=3",
        "units=2 optimizer=adamw groups=3 omits=1 weight_decay=1 new_rates=1",
        "units=2 rest_states=1 optimizer=adamw fused=1 two_optimizers=1",
        "units=2 optimizer=adam groups=2 amsgrad=1",
        "units=2 optimizer=adagrad groups=2",
        "units=2 optimizer=rmsprop groups=2 nesterov=1",
        "units=2 tied=tied deferred=1 unit0.batch_norm=1",
        "units=2 step0.before=write_shards",
        "units=2 zero=model_to_zero micro=2 no_sync=1",
        "units=2 zero=optimizers_to_zero steps=3 micro=3 no_sync=1 "
        "unit0.skipped_in=2",
        "units=2 unit0.batch_norm=1 unit1.counter=1",
        "units=2 step0.before=summon step1.before=visit",
        "units=2 step0.hold=1 step0.hold_evals=1",
        "precision=compute_bf16 units=2 optimizer=adamw",
        "precision=compute_bf16 units=2 micro=3 no_sync=1",
        "precision=compute_fp16 units=2 clip=1 scaler=1 infinite_in=2 steps=3",
        "group=shared units=2 micro=3 no_sync=1",
        "group=shared units=2 share_memory=0",
        "group=shared precision=compute_bf16 units=2 micro=3",
        "units=2 divide=2 predivide=1 micro=2 no_sync=1"));

INSTANTIATE_TEST_SUITE_P(
    Accumulation, KnownProgramTest,
    ::testing::Values(
        "units=2 micro=3 kept=1", "units=2 micro=3 kept=2",
        "units=2 micro=3 no_sync=1 unit0.skipped_micro=1",
        "units=2 micro=3 no_sync=1 unit0.skipped_micro=3",
        "units=2 micro=3 kept=1 unit0.skipped_micro=1",
        "units=2 micro=3 kept=1 unit0.skipped_micro=3",
        "units=2 micro=3 kept=2 unit0.skipped_micro=2",
        "units=2 tied=tied micro=3 no_sync=1 unit0.frozen=weight",
        "units=2 strategy=shard_grad_op micro=3 kept=2 unit0.skipped_micro=3",
        "units=2 strategy=shard_optimizer micro=3 kept=2 unit0.skipped_micro=3",
        "units=2 strategy=no_shard micro=3 kept=2 unit0.skipped_micro=3",
        "ranks=4 rows=1 units=2 strategy=hybrid_shard micro=3 kept=2 "
        "unit0.skipped_micro=3",
        "ranks=4 rows=1 units=2 strategy=hybrid_shard_grad_op micro=3 kept=2 "
        "unit0.skipped_micro=3",
        "units=2 zero=optimizers_to_zero micro=3 kept=2 "
        "unit0.skipped_micro=3",
        "units=2 micro=2 no_sync=1 step0.between=eval "
        "step0.between_too=inference_summon",
        "units=2 micro=3 no_sync=1 step0.style=eval_between",
        "units=2 divide=1 predivide=2 micro=3 no_sync=1",
        "precision=float units=2 divide=2 micro=3 no_sync=1"));

INSTANTIATE_TEST_SUITE_P(
    Strategies, KnownProgramTest,
    ::testing::Values(
        "units=2 optimizer=adamw micro=3",
        "units=2 optimizer=adamw micro=3 no_sync=1",
        "units=2 strategy=shard_grad_op optimizer=adamw micro=3",
        "units=2 strategy=shard_grad_op optimizer=adamw in_backward=1",
        "units=2 strategy=shard_optimizer optimizer=adamw micro=3",
        "units=2 strategy=shard_optimizer optimizer=adamw in_backward=1",
        "units=2 strategy=no_shard optimizer=adamw micro=3",
        "units=2 strategy=no_shard optimizer=adamw in_backward=1",
        "ranks=4 rows=1 units=2 strategy=hybrid_shard optimizer=adamw micro=3",
        "ranks=4 rows=1 units=2 strategy=hybrid_shard optimizer=adamw "
        "in_backward=1",
        "ranks=4 rows=1 units=2 strategy=hybrid_shard_grad_op optimizer=adamw "
        "micro=3 no_sync=1",
        "ranks=4 rows=1 units=2 strategy=hybrid_shard_grad_op optimizer=adamw "
        "in_backward=1",
        "group=shared units=2 optimizer=adamw micro=3 no_sync=1",
        "group=shared units=2 strategy=shard_grad_op optimizer=adamw micro=3",
        "group=shared units=2 strategy=shard_optimizer micro=3 no_sync=1",
        "group=shared units=2 strategy=no_shard micro=3 no_sync=1",
        "ranks=4 group=shared rows=1 units=2 strategy=hybrid_shard "
        "optimizer=adamw micro=3 no_sync=1",
        "ranks=4 rows=1 units=3 backward_group=2 micro=2 "
        "unit0.strategy=no_shard unit1.strategy=hybrid_shard "
        "unit2.strategy=full_shard",
        "ranks=4 units=3 backward_group=1 reshard_root=1",
        "ranks=4 units=3 backward_group=2 reshard_root=1",
        "ranks=4 units=3 backward_group=3 reshard_root=1",
        "units=2 reshard_root=1 unit0.child=1",
        "units=2 strategy=shard_grad_op unit0.child=1",
        "units=2 strategy=shard_optimizer unit0.child=1",
        "units=2 strategy=no_shard unit0.child=1",
        "units=2 tied=tied reshard_root=1 clip=1 unit0.layer_norm=1 "
        "unit1.batch_norm=1",
        "units=2 tied=tied strategy=shard_grad_op clip=1 unit0.layer_norm=1 "
        "unit1.batch_norm=1",
        "units=2 tied=tied strategy=shard_optimizer clip=1 unit0.layer_norm=1 "
        "unit1.batch_norm=1",
        "units=2 tied=tied strategy=no_shard clip=1 unit0.layer_norm=1 "
        "unit1.batch_norm=1",
        "precision=compute_fp16 units=2 optimizer=adamw",
        "ranks=3 late=1 yields=4 units=3 optimizer=adamw steps=5",
        "ranks=3 late=3 yields=4 units=3 optimizer=adamw steps=5"));

INSTANTIATE_TEST_SUITE_P(
    Regions, KnownProgramTest,
    ::testing::Values(
        "units=3 regions=each", "units=3 regions=all", "units=3 regions=nested",
        "units=3 bare=1 regions=each",
        "units=3 unit0.checkpoint=1 unit1.checkpoint=1 regions=each",
        "units=3 unit0.checkpoint=1 unit1.checkpoint=1 regions=all",
        "units=3 unit0.checkpoint=1 unit1.checkpoint=1 regions=nested",
        "units=3 unit0.twice=1 regions=each",
        "units=3 unit0.twice=1 regions=all",
        "units=3 unit0.checkpoint=1 unit0.twice=1",
        "units=3 strategy=shard_grad_op regions=each",
        "units=3 strategy=shard_grad_op unit0.checkpoint=1",
        "units=3 unit1.frozen=all regions=each",
        "units=3 unit0.frozen=all regions=all",
        "units=3 unit1.checkpoint=1 unit1.frozen=all",
        "units=3 bare=1 unit0.frozen=all regions=each",
        "units=3 tied=tied regions=each", "units=3 tied=tied regions=all",
        "units=3 unit1.sometimes=1 regions=each",
        "units=3 unit1.counter=1 unit1.batch_norm=1 regions=each",
        "units=3 unit1.counter=1 unit1.batch_norm=1 regions=nested",
        "units=3 unit1.counter=1 unit1.batch_norm=1 regions=all",
        "salt=1 units=3 transparent=1 unit1.batch_norm=1 regions=each",
        "salt=1 units=3 transparent=1 wrap_linear=1 regions=each",
        "salt=1 units=3 transparent=1 wrap_linear=1 regions=all",
        "salt=1 units=3 transparent=1 wrap_linear=1 regions=nested",
        "salt=1 units=3 transparent=1 wrap_linear=1 unit0.checkpoint=1",
        "salt=1 units=3 transparent=1 wrap_linear=1 unit0.twice=1 "
        "regions=each",
        "salt=1 units=3 transparent=1 wrap_linear=1 unit0.frozen=all "
        "step0.style=retain regions=nested",
        "salt=1 units=3 transparent=1 wrap_linear=1 micro=2 unit0.frozen=all "
        "step0.style=forwards_first regions=nested",
        "salt=1 units=3 transparent=1 wrap_linear=1 micro=2 unit0.frozen=all "
        "step0.style=forwards_first_reversed regions=each",
        "salt=1 units=3 transparent=1 wrap_linear=1 micro=2 unit0.frozen=all "
        "step0.style=one_loss regions=each",
        "units=3 offload_activations=1 regions=each",
        "units=3 offload_activations=1 unit0.checkpoint=1 unit1.checkpoint=1",
        "units=3 offload_activations=1 micro=2 no_sync=1 unit0.checkpoint=1 "
        "regions=nested",
        "units=2 micro=2 no_sync=1 unit0.batch_norm=1 unit0.recompute=1 "
        "unit1.recompute=1",
        "units=2 strategy=shard_grad_op micro=2 unit0.recompute=1",
        "units=2 strategy=shard_optimizer micro=2 unit0.recompute=1",
        "units=2 strategy=no_shard micro=2 unit0.recompute=1",
        "units=2 transparent=1 micro=2 unit0.recompute=1",
        "units=2 unit0.child=1 unit0.recompute=1",
        "salt=1 precision=compute_float units=2 unit0.recompute=1",
        "units=2 unit0.recompute=1 step0.before=eval"));

INSTANTIATE_TEST_SUITE_P(
    Hooks, KnownProgramTest,
    ::testing::Values(
        "units=2 unit0.hook=before", "units=2 unit0.hook=after",
        "units=2 micro=3 no_sync=1 unit0.hook=before",
        "units=2 unit0.hook=before unit0.recompute=1",
        "units=2 unit0.hook=after regions=each",
        "salt=1 units=2 transparent=1 wrap_linear=1 unit0.hook=before",
        "salt=1 units=2 transparent=1 wrap_linear=1 unit0.hook=after"));

// Parameters, gradients and states of optimizers rest in files.
INSTANTIATE_TEST_SUITE_P(
    Resting, KnownProgramTest,
    ::testing::Values(
        "units=3 rest_parameters=1 rest_gradients=1 rest_states=1 "
        "optimizer=adamw fused=1 in_backward=1",
        "units=2 rest_parameters=1 rest_gradients=1 rest_states=1 "
        "optimizer=adamw fused=1 steps=4 step1.before=snapshot "
        "step2.before=restore step3.before=new_optimizer",
        "units=2 rest_parameters=1 rest_gradients=1 rest_states=1 keep=1 "
        "optimizer=adamw fused=1 steps=4 step1.before=restart "
        "step3.before=restart",
        "units=2 rest_parameters=1 rest_gradients=1 rest_states=1 keep=1 "
        "fused=1 steps=4 step0.before=restart step3.before=restart"));

// Users hold units gathered, or look at them, while shards are written.
INSTANTIATE_TEST_SUITE_P(
    Held, KnownProgramTest,
    ::testing::Values(
        "units=3 unit0.frozen=weight unit2.frozen=weight step0.hold=3 "
        "step0.hold_evals=1 step1.hold=4 step1.hold_waits=0 step1.hold_evals=1",
        "precision=compute_bf16 units=3 step0.hold=3 step0.hold_evals=1 "
        "step1.hold=4 step1.hold_waits=0 step1.hold_evals=1",
        "group=shared units=3 share_memory=0 step0.hold=3 step0.hold_evals=1 "
        "step1.hold=4 step1.hold_waits=0 step1.hold_evals=1",
        "group=shared units=3 step0.hold=3 step0.hold_evals=1 step1.hold=4 "
        "step1.hold_waits=0 step1.hold_evals=1",
        "group=shared precision=compute_bf16 units=3 step0.hold=3 "
        "step0.hold_evals=1 step1.hold=4 step1.hold_waits=0 step1.hold_evals=1",
        "ranks=3 group=shared late=1 yields=4 units=3 step0.hold=3 "
        "step0.hold_evals=1 step1.hold=4 step1.hold_waits=0 step1.hold_evals=1",
        "ranks=3 group=shared late=3 yields=4 units=3 step0.hold=3 "
        "step0.hold_evals=1 step1.hold=4 step1.hold_waits=0 step1.hold_evals=1",
        "units=3 strategy=shard_grad_op step0.between=measure step0.hold=3 "
        "step0.hold_evals=1",
        "units=3 steps=5 step0.between=look step1.between=rebuild "
        "step2.between=measure step3.between=inference_summon",
        "group=shared units=3 steps=5 step0.between=look "
        "step1.between=rebuild step2.between=measure "
        "step3.between=inference_summon",
        "group=shared precision=compute_bf16 units=3 steps=5 "
        "step0.between=look step1.between=rebuild step2.between=measure "
        "step3.between=inference_summon",
        "ranks=3 group=shared late=3 yields=4 units=3 steps=5 "
        "step0.between=look step1.between=rebuild step2.between=measure "
        "step3.between=inference_summon"));

// What is called inside InferenceMode changes nothing.
INSTANTIATE_TEST_SUITE_P(
    InferenceMode, KnownProgramTest,
    ::testing::Values(
        "units=2 unit0.batch_norm=1 step0.before=eval "
        "step1.before=lost_forward inference=1",
        "units=2 step0.before=summon step1.before=visit inference=1",
        "units=2 optimizer=adamw steps=3 step0.before=load "
        "step1.before=snapshot step2.before=restore inference=1",
        "units=2 step0.before=rebuild step1.before=write_shards inference=1",
        "precision=compute_bf16 units=2 step0.before=eval "
        "step1.before=lost_forward inference=1",
        "precision=compute_bf16 units=2 step0.before=summon step1.before=visit "
        "inference=1",
        "group=shared units=2 step0.before=eval step1.before=lost_forward "
        "inference=1",
        "group=shared units=2 step0.before=summon step1.before=visit "
        "inference=1",
        "group=shared units=2 optimizer=adamw steps=3 step0.before=rebuild "
        "step1.before=snapshot step2.before=restore inference=1",
        "ranks=3 salt=307 quantize_gather=1 momentum=0 step1.before=unshard "
        "inference=1"));

// A sharded run is compared with what another program has recorded.
struct Mismatch {
  const char* sharded;
  const char* recorded;
  const char* seen;  // a part of the error
};

class ProgramComparisonTest : public ::testing::TestWithParam<Mismatch> {};

TEST_P(ProgramComparisonTest, SeesTheDifference) {
  ASSERT_OK_AND_ASSIGN(const Program sharded, ParseProgram(GetParam().sharded));
  ASSERT_OK_AND_ASSIGN(const auto recorded, ParseProgram(GetParam().recorded));
  const ProgramRecord record = RunPlainProgram(recorded);
  const absl::Status status =
      comm::testing::RunAllRanks(2, [&](comm::Communicator& world) {
        return RunShardedProgram(sharded, record, world, ::testing::TempDir());
      });
  EXPECT_EQ(OutcomeOf(status).kind, ProgramOutcome::kDiffers) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), GetParam().seen)) << status;
}

INSTANTIATE_TEST_SUITE_P(
    Everything, ProgramComparisonTest,
    ::testing::Values(
        Mismatch{"", "weight_decay=1", "after step 0"},
        Mismatch{"compare_each=0", "compare_each=0 weight_decay=1",
                 "the loss of step 1"},
        Mismatch{"steps=1 optimizer=adamw", "steps=1 optimizer=adamw micro=2",
                 "the loss of step 0"},
        Mismatch{"steps=1 micro=2", "steps=1 micro=2 divide=1", "after step 0"},
        Mismatch{"clip=1", "clip=1 norm=1", "the norm of step 0"},
        Mismatch{"scaler=1", "scaler=1 infinite_in=1", "the scale after"},
        Mismatch{"input_grad=1", "input_grad=1 step0.style=retain",
                 "the gradient of input 0"},
        Mismatch{"unit0.batch_norm=1",
                 "unit0.batch_norm=1 step0.before=lost_forward",
                 "running_mean after step 0"},
        Mismatch{"unit0.counter=1", "unit0.counter=1 step0.before=lost_forward",
                 "counter after step 0"},
        Mismatch{"step0.before=eval", "step0.before=eval unit0.outputs=written",
                 "output 0 of an evaluation"},
        Mismatch{"optimizer=adagrad", "optimizer=adagrad step0.style=retain",
                 "after step 0"},
        Mismatch{"step0.before=summon step0.before_too=save",
                 "step0.before=visit step0.before_too=save",
                 "what is saved of"}));

}  // namespace
}  // namespace fsdp::testing
