// Failures inside operators, whose callbacks' exceptions LibTorch swallows.

#include "base/testing/users_error.h"
#include "comm/testing/failing_communicator.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/errors/acting_net.h"

namespace fsdp::testing::acting_net {
namespace {

using Code = absl::StatusCode;

TEST(TransparentErrorsTest, AnExceptionInForwardKeepsItsType) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    for (int round = 0; round < 2; ++round) {
      model->module()->act = [](Acting& net, const at::Tensor& x) {
        net.second->forward(net.first->forward(x));
        throw UsersError("out of tea");
        return x;
      };
      bool kept_type = false;
      TorchToStatus("forward", [&] {
        try {
          model->forward(Rows(0, 3, kDim));
        } catch (const UsersError&) {
          kept_type = true;
        }
      }).IgnoreError();
      if (!kept_type) return absl::InternalError("type");
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, communicator));
    }
    return absl::OkStatus();
  }));
}

TEST(TransparentErrorsTest, AnExceptionInBackward) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    for (const bool through_us : {true, false}) {
      model->module()->act = [](Acting& net, const at::Tensor& x) {
        at::Tensor y = net.second->forward(net.first->forward(x));
        y.register_hook([](const at::Tensor&) -> at::Tensor {
          throw UsersError("in a hook");
        });
        return net.third->forward(y);
      };
      const at::Tensor loss = model->forward(Rows(0, 3, kDim)).sum();
      const absl::Status status =
          through_us ? model->Backward(loss)
                     : TorchToStatus("backward", [&] { loss.backward(); });
      FSDP_RETURN_IF_ERROR(Expect(status, Code::kUnknown, "in a hook"));
      if (!through_us) {
        // The next forward reports it.
        c10::NoGradGuard no_grad;
        model->module()->act = nullptr;
        model->forward(Rows(0, 3, kDim));
      }
      FSDP_RETURN_IF_ERROR(CheckStepIsExact(model, communicator));
    }
    return absl::OkStatus();
  }));
}

TEST(TransparentErrorsTest, AnExceptionInBackwardLeavesAnotherBackwardExact) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator));
    FSDP_ASSIGN_OR_RETURN(Model fresh, ShardActing(communicator));
    const at::Tensor x = Rows(0, 3, kDim);
    const at::Tensor fails = model->forward(x).sum();
    at::Tensor other = model->forward(x);
    // This loss enters backward without the root's output.
    const at::Tensor loss = other.square().mean();
    const at::Tensor bad = fails * 2;
    fails.register_hook(
        [](const at::Tensor&) -> at::Tensor { throw UsersError("hook"); });
    if (TorchToStatus("b", [&] { bad.backward(); }).ok()) {
      return absl::InternalError("the hook did not throw");
    }
    FSDP_RETURN_IF_ERROR(TorchToStatus("b", [&] { loss.backward(); }));
    FSDP_RETURN_IF_ERROR(fresh->Backward(fresh->forward(x).square().mean()));
    for (size_t i = 0; i < fresh->Parameters().size(); ++i) {
      if (!at::equal(model->Parameters()[i].grad(),
                     fresh->Parameters()[i].grad())) {
        return absl::InternalError(absl::StrCat("gradient ", i, " differs"));
      }
    }
    return CheckStepIsExact(model, communicator);
  }));
}

// If a collective fails inside an operator's callback, the step's error is the
// collective's, not that of the operator, which then finds no memory.
void ExpectReportsFailureOf(const std::string& label, int64_t nth,
                            bool through_us) {
  auto group = comm::CreateLocalGroup(kRanks);
  ASSERT_OK(group.status());
  comm::testing::FailurePlan plan;
  plan.label = label;
  plan.nth = nth;
  plan.error = absl::UnavailableError("the cable was pulled");
  (*group)[1] = FailOnPlan(std::move((*group)[1]), plan);
  const std::vector<absl::Status> statuses =
      RunRanks(*group, [&](Communicator& communicator) -> absl::Status {
        Options options = TransparentOptions();
        options.abort_on_failure = true;
        options.prefetch.forward = options.prefetch.backward = false;
        FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator, options));
        return TorchToStatus("step", [&] {
          const at::Tensor loss = model->forward(Rows(0, 3, kDim)).sum();
          if (through_us) {
            ThrowIfError(model->Backward(loss));
          } else {
            loss.backward();
          }
        });
      });
  if (through_us) {
    EXPECT_THAT(statuses[1], StatusIs(Code::kUnavailable,
                                      HasSubstr("the cable was pulled")));
    EXPECT_THAT(statuses[0],
                StatusIs(Code::kAborted, HasSubstr("the cable was pulled")));
  } else {
    EXPECT_FALSE(statuses[0].ok());
    EXPECT_FALSE(statuses[1].ok());
  }
}

TEST(TransparentErrorsTest, AGatherThatFailsInForward) {
  // The first of a unit's calls broadcasts its parameters.
  ExpectReportsFailureOf("second", 1, /*through_us=*/true);
}

TEST(TransparentErrorsTest, AGatherThatFailsInBackward) {
  ExpectReportsFailureOf("second", 2, /*through_us=*/true);
  ExpectReportsFailureOf("second", 2, /*through_us=*/false);
}

TEST(TransparentErrorsTest, RanksThatRunDifferentUnits) {
  const std::vector<absl::Status> statuses =
      RunRanks(kRanks, [](Communicator& communicator) -> absl::Status {
        Options options = TransparentOptions();
        options.abort_on_failure = true;
        FSDP_ASSIGN_OR_RETURN(Model model, ShardActing(communicator, options));
        model->module()->act = [&](Acting& net, const at::Tensor& x) {
          return communicator.rank() == 0 ? net.first->forward(x)
                                          : net.second->forward(x);
        };
        return TorchToStatus("forward",
                             [&] { model->forward(Rows(0, 3, kDim)); });
      });
  EXPECT_THAT(statuses, Each(StatusIs(Code::kInvalidArgument,
                                      AllOf(HasSubstr("all-gather of first"),
                                            HasSubstr("of second")))));
}

}  // namespace
}  // namespace fsdp::testing::acting_net
