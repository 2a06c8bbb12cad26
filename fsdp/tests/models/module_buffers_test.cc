// Buffers of every kind.
#include <ATen/ATen.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 4;
constexpr int kRanks = 2;

class HoldsABuffer : public torch::nn::Module {
 public:
  explicit HoldsABuffer(const at::Tensor& value)
      : linear(register_module("linear", Linear(kDim, kDim))),
        buffer(register_buffer("buffer", value)) {
    FillParameters(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return Forward(linear, x); }
  Linear linear;
  at::Tensor buffer;
};

// Returns a dense copy that can be compared.
at::Tensor Values(const at::Tensor& buffer) {
  at::Tensor dense = buffer.layout() == at::kStrided ? buffer.resolve_conj()
                                                     : buffer.to_dense();
  return at::is_complex(dense) ? at::view_as_real(dense).clone()
                               : dense.clone();
}

struct BufferKind {
  std::string name;
  std::function<at::Tensor(double)> make;  // from a rank's own number
};

const BufferKind kBuffers[] = {
    {"Expanded",
     [](double value) {
       return at::full({1, kDim}, value).expand({3, kDim});
     }},
    {"ExpandedTwice",
     [](double value) {
       return at::full({1}, value).expand({3, kDim});
     }},
    {"Strided",
     [](double value) {
       return at::full({kDim, 6}, value).slice(1, 0, 6, 2);
     }},
    {"Transposed",
     [](double value) {
       return at::full({2, 3}, value).t();
     }},
    {"Sparse",
     [](double value) { return (at::eye(kDim) * value).to_sparse(); }},
    {"SparseCsr",
     [](double value) { return (at::eye(kDim) * value).to_sparse_csr(); }},
    {"Complex",
     [](double value) {
       return at::complex(at::full({kDim}, value), at::ones({kDim}));
     }},
    {"Conjugate",
     [](double value) {
       return at::complex(at::full({kDim}, value), at::ones({kDim})).conj();
     }},
    {"Bool",
     [](double value) { return at::full({kDim}, value > 1, at::kBool); }},
    {"Empty",
     [](double) {
       return at::ones({0, 3});
     }},
};

// From rank 0 alone, it is loaded where it is dense.
TEST(BufferTest, OfEveryKindIsRank0sAndGoesThroughStateDicts) {
  for (const BufferKind& kind : kBuffers) {
    EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
      auto net = std::make_shared<HoldsABuffer>(kind.make(world.rank() + 1));
      FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
      const at::Tensor expected = Values(kind.make(1));
      EXPECT_TRUE(at::equal(Values(net->buffer), expected)) << "not rank 0's";
      FSDP_RETURN_IF_ERROR(
          model->Backward(model->forward(Rows(0, 3, kDim)).sum()));
      FSDP_ASSIGN_OR_RETURN(StateDict dict, model->GatherStateDict());
      EXPECT_TRUE(at::equal(Values(dict["buffer"]), expected))
          << "in the state dict";
      dict["buffer"] = kind.make(5).clone();
      FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
      EXPECT_TRUE(at::equal(Values(net->buffer), Values(kind.make(5))))
          << "loaded";
      dict["buffer"] = kind.make(1).clone();
      LoadOptions load;
      load.rank0_only = true;
      const absl::Status from_rank0 =
          model->LoadStateDict(world.rank() == 0 ? dict : StateDict(), load);
      if (net->buffer.layout() != at::kStrided) {
        EXPECT_THAT(from_rank0,
                    StatusIs(Code::kUnimplemented, HasSubstr("is sparse")));
        return absl::OkStatus();
      }
      FSDP_RETURN_IF_ERROR(from_rank0);
      return Check(at::equal(Values(net->buffer), expected), "not rank 0's");
    })) << kind.name;
  }
}

TEST(BufferTest, AnExpandedOneTakesNoValueThatDiffersWithinIt) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    auto net =
        std::make_shared<HoldsABuffer>(at::ones({1, kDim}).expand({3, kDim}));
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world)));
    FSDP_ASSIGN_OR_RETURN(StateDict dict, model->GatherStateDict());
    dict["buffer"] = at::arange(3 * kDim, at::kFloat).view({3, kDim});
    return CheckRefused(model->LoadStateDict(dict),
                        "buffer: values differ where the model's",
                        Code::kInvalidArgument);
  }));
}

// If one rank has a buffer that cannot be sent, all ranks refuse it with the
// same text, and nothing is changed.
TEST(BufferTest, ThatCannotBeSentIsRefusedByAllRanks) {
  const std::vector<std::function<at::Tensor()>> makes = {
      [] {
        return at::ones({8}).as_strided({5, 4}, {1, 1});
      },
      [] { return at::empty({kDim}, at::kMeta); },
      [] {
        return at::zeros({kDim, kDim}).to_sparse();
      }};
  for (const auto& make : makes) {
    const auto statuses = RunRanks(kRanks, [&](Communicator& world) {
      auto net = std::make_shared<HoldsABuffer>(
          world.rank() == 1 ? make() : at::eye(kDim).to_sparse());
      absl::Status status = FullyShard(net, Unowned(world)).status();
      EXPECT_THAT(TorchToStatus("use", [&] { net->linear->weight.sum(); }),
                  IsOk());
      return status;
    });
    EXPECT_THAT(statuses, AllRefuse("buffer", Code::kInvalidArgument));
    EXPECT_EQ(statuses[0].message(), statuses[1].message());
  }
}

}  // namespace
}  // namespace fsdp::testing
