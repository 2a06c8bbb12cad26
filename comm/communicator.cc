#include "comm/communicator.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <iterator>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "device_ops/pack.h"

namespace fsdp::comm {

absl::string_view CollectiveName(Collective collective) {
  static constexpr absl::string_view kNames[] = {"all-gather", "reduce-scatter",
                                                 "all-to-all", "all-reduce",
                                                 "broadcast",  "split"};
  static_assert(std::size(kNames) ==
                static_cast<size_t>(Collective::kSplit) + 1);
  const auto index = static_cast<size_t>(collective);
  return index < std::size(kNames) ? kNames[index] : "unknown collective";
}

absl::string_view ReduceOpName(ReduceOp op) {
  static constexpr absl::string_view kNames[] = {"sum", "min", "max"};
  static_assert(std::size(kNames) == static_cast<size_t>(ReduceOp::kMax) + 1);
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "unknown reduction";
}

bool operator==(const Call& a, const Call& b) {
  const auto fields = [](const Call& call) {
    return std::tie(call.collective, call.label, call.dtype, call.count,
                    call.detail);
  };
  return fields(a) == fields(b);
}

Call CallOf(Collective collective, absl::string_view label,
            const at::Tensor& counted, absl::string_view detail) {
  return {collective, std::string(label),
          std::string(DtypeName(counted.scalar_type())), counted.numel(),
          std::string(detail)};
}

std::string ToString(const Call& call) {
  std::string text =
      absl::StrCat(CollectiveName(call.collective), " of ", call.label);
  if (!call.dtype.empty()) {
    absl::StrAppend(&text, " (", call.dtype, " x ", call.count);
    if (!call.detail.empty()) absl::StrAppend(&text, ", ", call.detail);
    absl::StrAppend(&text, ")");
  }
  return text;
}

std::string Name(const Call& call, int64_t sequence) {
  return absl::StrCat(CollectiveName(call.collective), " #", sequence, " of ",
                      call.label);
}

RankNames::RankNames(int size) : RankNames(size, nullptr) {}

RankNames::RankNames(int size,
                     std::shared_ptr<const std::vector<int>> world_ranks)
    : size_(size), world_ranks_(std::move(world_ranks)) {
  FSDP_CHECK(size > 0);
}

absl::StatusOr<RankNames> RankNames::Of(int size,
                                        std::vector<int> world_ranks) {
  if (world_ranks.empty()) return RankNames(size);
  if (static_cast<int>(world_ranks.size()) != size) {
    return absl::InvalidArgumentError(
        absl::StrCat("a group of ", size, " ranks, and ", world_ranks.size(),
                     " ranks of the world that they are"));
  }
  return RankNames(
      size, std::make_shared<const std::vector<int>>(std::move(world_ranks)));
}

RankNames RankNames::Part(absl::Span<const int> members) const {
  std::vector<int> world_ranks;
  bool is_all = static_cast<int>(members.size()) == size_;
  for (const int member : members) {
    is_all = is_all && member == static_cast<int>(world_ranks.size());
    world_ranks.push_back(world_rank(member));
  }
  if (is_all) return *this;
  const auto size = static_cast<int>(members.size());
  return RankNames(
      size, std::make_shared<const std::vector<int>>(std::move(world_ranks)));
}

int RankNames::world_rank(int rank) const {
  FSDP_CHECK(rank >= 0 && rank < size_);
  return world_ranks_ == nullptr ? rank : (*world_ranks_)[rank];
}

std::string RankNames::Suffix(int rank) const {
  if (world_ranks_ == nullptr || world_rank(rank) == kNobodyKnows) return "";
  return absl::StrCat(" (world rank ", world_rank(rank), ")");
}

std::string RankNames::Name(int rank) const {
  return absl::StrCat("rank ", rank, Suffix(rank));
}

std::string RankNames::Place(int rank) const {
  return absl::StrCat("rank ", rank, " of ", size_, Suffix(rank));
}

std::string RankNames::List(absl::Span<const int> ranks) const {
  if (ranks.size() == 1) return Name(ranks[0]);
  std::string text = absl::StrCat("ranks ", absl::StrJoin(ranks, ", "));
  if (world_ranks_ == nullptr) return text;
  std::vector<int> world_ranks;
  world_ranks.reserve(ranks.size());
  for (const int rank : ranks) {
    if (world_rank(rank) == kNobodyKnows) return text;
    world_ranks.push_back(world_rank(rank));
  }
  return absl::StrCat(text, " (world ranks ", absl::StrJoin(world_ranks, ", "),
                      ")");
}

std::string RankNames::NameInWorld(int world_rank) const {
  return absl::StrCat(world_ranks_ == nullptr ? "" : "world ", "rank ",
                      world_rank);
}

namespace {

struct Check {
  const Communicator& communicator;
  Collective collective;
  absl::string_view label;

  absl::Status Error(absl::StatusCode code, absl::string_view why) const {
    return absl::Status(
        code, absl::StrCat(CollectiveName(collective), " of ", label, " on ",
                           communicator.Place(), ": ", why));
  }
  absl::Status Invalid(absl::string_view why) const {
    return Error(absl::StatusCode::kInvalidArgument, why);
  }
};

struct Named {
  absl::string_view name;
  const at::Tensor& tensor;
};

std::string Describe(const Named& named) {
  const at::Tensor& tensor = named.tensor;
  return absl::StrCat(
      "`", named.name, "` (", c10::toString(tensor.scalar_type()), ", shape [",
      absl::StrJoin(tensor.sizes(), ", "), "], ", tensor.device().str(), ")");
}

const char* Begin(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

bool Overlap(const at::Tensor& a, const at::Tensor& b) {
  return Begin(a) < Begin(b) + b.nbytes() && Begin(b) < Begin(a) + a.nbytes();
}

absl::Status CheckTensor(const Check& check, const Named& named) {
  const at::Tensor& tensor = named.tensor;
  if (!tensor.defined()) {
    return check.Invalid(
        absl::StrCat("`", named.name, "` is an undefined tensor"));
  }
  if (tensor.layout() != at::kStrided) {
    return check.Error(absl::StatusCode::kUnimplemented,
                       absl::StrCat(Describe(named), " is not dense"));
  }
  if (DtypeName(tensor.scalar_type()) == "unsupported") {
    return check.Error(
        absl::StatusCode::kUnimplemented,
        absl::StrCat(Describe(named), " has a dtype that is not one of ",
                     "float32, float64, float16, bfloat16, int32, int64, "
                     "uint8"));
  }
  if (tensor.dim() != 1 || !tensor.is_contiguous()) {
    return check.Invalid(absl::StrCat(
        Describe(named), " must be contiguous and have one dimension"));
  }
  // Reading the address of memory that has been freed may throw.
  const void* data = nullptr;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      [&] { return std::string(check.Invalid(Describe(named)).message()); },
      [&] { data = tensor.const_data_ptr(); }));
  if (data == nullptr && tensor.numel() > 0) {
    return check.Invalid(
        absl::StrCat(Describe(named), " has no memory behind it"));
  }
  return absl::OkStatus();
}

// Checks both tensors: device, dtype, unless a sum is scaled, and sizes. They
// are disjoint, or `part` is this rank's slice of `whole` where that may be.
absl::Status CheckPair(const Check& check, const Named& whole,
                       const Named& part, bool is_scaled = false) {
  FSDP_RETURN_IF_ERROR(CheckTensor(check, whole));
  FSDP_RETURN_IF_ERROR(CheckTensor(check, part));
  const at::Tensor& a = whole.tensor;
  const at::Tensor& b = part.tensor;
  const auto invalid = [&](const auto&... why) {
    return check.Invalid(
        absl::StrCat(Describe(whole), " and ", Describe(part), why...));
  };
  if (a.device() != b.device() ||
      (!is_scaled && a.scalar_type() != b.scalar_type())) {
    return invalid(" differ in dtype or device");
  }
  const int ranks = check.communicator.world_size();
  const bool is_exchange = check.collective == Collective::kAllToAll;
  if (is_exchange && (a.numel() != b.numel() || b.numel() % ranks != 0)) {
    return invalid(": both need the same number of elements, ", ranks,
                   " times what goes to each rank");
  }
  if (!is_exchange && a.numel() != b.numel() * ranks) {
    return invalid(": `", whole.name, "` needs ", ranks,
                   " times the elements of `", part.name, "`");
  }
  for (const at::Tensor* tensor : {&a, &b}) {
    if (!is_scaled || tensor->is_floating_point()) continue;
    return check.Invalid(absl::StrCat(Describe({"tensor", *tensor}),
                                      " cannot hold a scaled sum; it takes "
                                      "floating-point dtypes"));
  }
  if (b.numel() == 0 || !Overlap(a, b)) return absl::OkStatus();
  if (is_exchange || is_scaled) return invalid(" overlap");
  const int rank = check.communicator.rank();
  if (Begin(b) == Begin(a) + b.nbytes() * rank) return absl::OkStatus();
  return invalid(" overlap; only rank ", rank, "'s own slice of `", whole.name,
                 "` may be `", part.name, "`");
}

absl::Status CheckArgs(const Check& check, const CollectiveArgs& args) {
  const auto& [collective, out, in, op, root, scaled] = args;
  if (scaled &&
      (collective != Collective::kReduceScatter || op != ReduceOp::kSum)) {
    return check.Invalid("only the sum of a reduce-scatter is scaled");
  }
  switch (collective) {
    case Collective::kAllGather:
      return CheckPair(check, {"out", out}, {"in", in});
    case Collective::kReduceScatter:
      return CheckPair(check, {"in", in}, {"out", out}, scaled.has_value());
    case Collective::kAllToAll:
      FSDP_RETURN_IF_ERROR(CheckPair(check, {"out", out}, {"in", in}));
      if (check.communicator.HasAllToAll()) return absl::OkStatus();
      return check.Error(
          absl::StatusCode::kUnimplemented,
          absl::StrCat(check.communicator.ToString(), " has no all-to-all"));
    case Collective::kAllReduce:
      return CheckTensor(check, {"tensor", out});
    case Collective::kBroadcast:
      FSDP_RETURN_IF_ERROR(CheckTensor(check, {"tensor", out}));
      if (root >= 0 && root < check.communicator.world_size()) {
        return absl::OkStatus();
      }
      return check.Invalid(
          absl::StrCat("there is no rank ", root, " to be the root"));
    case Collective::kSplit:
      break;
  }
  return check.Invalid("it moves no tensors; call Split()");
}

// Scales the sum, which is in `sum` when `base` is done, into `out`.
class ScaledWork final : public Work {
 public:
  ScaledWork(std::unique_ptr<Work> base, at::Tensor out, at::Tensor sum,
             ScaledSum scaled, absl::Duration timeout)
      : base_(std::move(base)),
        out_(std::move(out)),
        sum_(std::move(sum)),
        scaled_(scaled),
        timeout_(timeout) {}

  absl::Status Wait(absl::Time deadline) override {
    if (result_) return *result_;
    result_ = base_->Wait(deadline);
    if (result_->ok()) result_ = TorchToStatus("scale a sum", [&] { Scale(); });
    return *result_;
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + timeout_);
  }

 private:
  void Scale() {
    c10::NoGradGuard no_grad;
    if (scaled_.accumulate) {
      out_.add_(sum_, scaled_.scale);
    } else {
      device_ops::CopyScaled(out_, sum_, scaled_.scale);
    }
  }

  const std::unique_ptr<Work> base_;
  at::Tensor out_;
  const at::Tensor sum_;
  const ScaledSum scaled_;
  const absl::Duration timeout_;
  std::optional<absl::Status> result_;
};

bool IsOfInferenceMode(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_inference();
}

// Returns a tensor over the same memory that can be written where `tensor`,
// made in a c10::InferenceMode, cannot: behind that mode, and in other threads.
at::Tensor AsWritable(const at::Tensor& tensor) {
  if (!IsOfInferenceMode(tensor)) return tensor;
  const NormalMode normal;
  return TensorOver(tensor.storage(), tensor.storage_offset(), tensor.sizes(),
                    tensor.strides(), tensor.scalar_type());
}

}  // namespace

absl::string_view DtypeName(at::ScalarType dtype) {
  static constexpr std::pair<at::ScalarType, absl::string_view> kDtypes[] = {
      {at::kFloat, "float32"}, {at::kDouble, "float64"},
      {at::kHalf, "float16"},  {at::kBFloat16, "bfloat16"},
      {at::kInt, "int32"},     {at::kLong, "int64"},
      {at::kByte, "uint8"},
  };
  for (const auto& [known, name] : kDtypes) {
    if (known == dtype) return name;
  }
  return "unsupported";
}

const at::Tensor& CollectiveArgs::whole() const {
  const bool is_divided = collective == Collective::kReduceScatter ||
                          collective == Collective::kAllToAll;
  return is_divided ? in : out;
}

const at::Tensor& CollectiveArgs::counted() const {
  const bool is_in = collective == Collective::kAllGather ||
                     collective == Collective::kAllToAll;
  return is_in ? in : out;
}

std::string CollectiveArgs::detail() const {
  if (collective == Collective::kBroadcast) return absl::StrCat("root ", root);
  const bool is_reduction = collective == Collective::kReduceScatter ||
                            collective == Collective::kAllReduce;
  return std::string(is_reduction ? ReduceOpName(op) : "");
}

StartedWork Communicator::AllGather(const at::Tensor& out, const at::Tensor& in,
                                    absl::string_view label) {
  return StartCollective({Collective::kAllGather, out, in}, label);
}

StartedWork Communicator::ReduceScatter(const at::Tensor& out,
                                        const at::Tensor& in, ReduceOp op,
                                        absl::string_view label) {
  return StartCollective({Collective::kReduceScatter, out, in, op}, label);
}

StartedWork Communicator::ReduceScatterScaled(const at::Tensor& out,
                                              const at::Tensor& in,
                                              ScaledSum sum,
                                              absl::string_view label) {
  return StartCollective(
      {Collective::kReduceScatter, out, in, ReduceOp::kSum, 0, sum}, label);
}

StartedWork Communicator::AllToAll(const at::Tensor& out, const at::Tensor& in,
                                   absl::string_view label) {
  return StartCollective({Collective::kAllToAll, out, in}, label);
}

StartedWork Communicator::AllReduce(const at::Tensor& tensor, ReduceOp op,
                                    absl::string_view label) {
  return StartCollective({Collective::kAllReduce, tensor, {}, op}, label);
}

StartedWork Communicator::Broadcast(const at::Tensor& tensor, int root,
                                    absl::string_view label) {
  return StartCollective(
      {Collective::kBroadcast, tensor, {}, ReduceOp::kSum, root}, label);
}

StartedWork Communicator::StartCollective(const CollectiveArgs& args,
                                          absl::string_view label) {
  FSDP_RETURN_IF_ERROR(CheckArgs({*this, args.collective, label}, args));
  if (IsOfInferenceMode(args.out) || IsOfInferenceMode(args.in)) {
    CollectiveArgs writable = args;
    writable.out = AsWritable(args.out);
    writable.in = AsWritable(args.in);
    return StartCollective(writable, label);
  }
  return args.scaled ? DoScaledSum(args, label) : DoCollective(args, label);
}

absl::StatusOr<CommonMemory> Communicator::AllocateCommon(int64_t /*bytes*/) {
  return absl::UnimplementedError(
      absl::StrCat(ToString(), ": the ranks have no memory in common"));
}

StartedWork Communicator::DoScaledSum(const CollectiveArgs& args,
                                      absl::string_view label) {
  CollectiveArgs sum = args;
  sum.scaled.reset();
  sum.out = args.in.narrow(0, rank() * args.out.numel(), args.out.numel());
  FSDP_ASSIGN_OR_RETURN(auto work, DoCollective(sum, label));
  return std::make_unique<ScaledWork>(std::move(work), args.out, sum.out,
                                      *args.scaled, default_timeout());
}

absl::Status Communicator::EndedByException() {
  return absl::UnknownError(
      "it has ended by an exception, which its own output shows");
}

absl::StatusOr<at::Tensor> Communicator::AllocatePlain(int64_t bytes,
                                                       c10::Device device) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot allocate ", bytes, " bytes"));
  }
  at::Tensor tensor;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      absl::StrCat("allocate ", bytes, " bytes",
                   device.is_cpu() ? "" : absl::StrCat(" on ", device.str())),
      [&] {
        tensor =
            at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
      }));
  return tensor;
}

absl::Status Communicator::CheckColor(int color) const {
  if (color >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("split on ", Place(), ": color ", color, " is negative"));
}

}  // namespace fsdp::comm
