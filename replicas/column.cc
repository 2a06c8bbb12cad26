#include "replicas/column.h"

#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp::replicas {
namespace {

absl::Status EpochIsOver(int64_t epoch) {
  return absl::CancelledError(absl::StrCat("epoch ", epoch, " is over"));
}

}  // namespace

absl::Status Column::Connect(int64_t epoch, int index, int size) {
  {
    // Destroyed outside the lock, since that may take a while.
    std::shared_ptr<comm::Communicator> before;
    absl::MutexLock lock(&mutex_);
    before = std::exchange(ranks_, nullptr);
    epoch_ = -1;
  }
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> ranks,
                        ConnectGroup(epoch, "", index, size));
  absl::MutexLock lock(&mutex_);
  ranks_ = std::move(ranks);
  epoch_ = epoch;
  if (epoch < first_alive_) return EpochIsOver(epoch);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<comm::Communicator>> Column::ConnectPart(
    int index, int size) {
  int64_t epoch = -1;
  {
    absl::MutexLock lock(&mutex_);
    epoch = epoch_;
  }
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> part,
                        ConnectGroup(epoch, "/part", index, size));
  absl::MutexLock lock(&mutex_);
  part_ = part;
  if (epoch < first_alive_) return EpochIsOver(epoch);
  return part;
}

absl::StatusOr<std::shared_ptr<comm::Communicator>> Column::ConnectGroup(
    int64_t epoch, absl::string_view name, int index, int size) {
  comm::Environment environment = place_;
  environment.rank = index;
  environment.world_size = size;
  environment.kept_store_prefix =
      absl::StrCat(place_.kept_store_prefix, "/epoch/", epoch, name);
  comm::ConnectOptions options = options_;
  options.shows_failures = false;  // replicas may come and go
  options.stop_requested = [this, epoch] {
    {
      absl::MutexLock lock(&mutex_);
      if (epoch < first_alive_) return true;
    }
    return options_.stop_requested && options_.stop_requested();
  };
  absl::StatusOr<std::unique_ptr<comm::Communicator>> ranks =
      comm::Connect(environment, options);
  if (ranks.ok()) return *std::move(ranks);
  return Annotate(ranks.status(),
                  absl::StrCat("connecting replicas in epoch ", epoch));
}

void Column::EndBefore(int64_t epoch, const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    first_alive_ = std::max(first_alive_, epoch);
  }
  EndGroups(epoch, reason);
}

void Column::EndGroups(int64_t epoch, const absl::Status& reason) {
  std::array<std::shared_ptr<comm::Communicator>, 2> ended;
  {
    absl::MutexLock lock(&mutex_);
    if (epoch_ < epoch) ended = {part_.lock(), ranks_};
  }
  for (const auto& group : ended) {
    if (group != nullptr) group->Abort(reason);
  }
}

namespace {

constexpr char kWhat[] = "averaging gradients over replicas";

// Bytes of one collective: long enough to be fast, short enough to travel while
// the next ones are copied.
constexpr int64_t kBucketBytes = int64_t{16} << 20;

// The code of a leaf without a gradient; a dtype has one from 1 to 255.
constexpr uint8_t kNone = 0;

uint8_t CodeOf(const at::Tensor& leaf) {
  const at::Tensor& gradient = leaf.grad();
  if (!gradient.defined() || gradient.numel() == 0) return kNone;
  return static_cast<uint8_t>(static_cast<int>(gradient.scalar_type()) + 1);
}

c10::ScalarType DtypeOf(int code) {
  return static_cast<c10::ScalarType>(code - 1);
}

}  // namespace

absl::Status GradientMeans::Sum(absl::Time deadline) {
  parts_.clear();
  if (column_.world_size() == 1) return absl::OkStatus();
  const NormalMode normal;
  absl::Status status = TorchToStatus(kWhat, [&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(Plan(deadline));
    return AddUp(deadline);
  });
  // The others wait for this rank and do not know that it failed.
  if (!status.ok()) column_.Abort(status);
  return status;
}

// Finds out which leaves have a gradient in any replica and where their sums
// go. The dtype of a gradient may be another than its leaf's.
absl::Status GradientMeans::Plan(absl::Time deadline) {
  at::Tensor dtypes =
      at::zeros({static_cast<int64_t>(leaves_.size())}, at::kByte);
  auto* const codes = dtypes.data_ptr<uint8_t>();
  for (size_t i = 0; i < leaves_.size(); ++i) codes[i] = CodeOf(leaves_[i]);
  FSDP_ASSIGN_OR_RETURN(auto work,
                        column_.AllReduce(dtypes, comm::ReduceOp::kMax,
                                          "dtypes of gradients of replicas"));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  std::map<Kind, int64_t> counts;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (codes[i] == kNone) continue;
    const int mine = CodeOf(leaves_[i]);
    if (mine != kNone && mine != codes[i]) {
      return absl::InvalidArgumentError(absl::StrCat(
          kWhat, ": a gradient is ", toString(DtypeOf(mine)), " here and ",
          toString(DtypeOf(codes[i])), " in another replica"));
    }
    const c10::Device device = leaves_[i].device();
    const Kind kind(device.type(), device.index(), DtypeOf(codes[i]));
    int64_t& count = counts[kind];
    parts_.push_back({i, kind, count});
    count += leaves_[i].numel();
  }
  // The counts are equal in all of the column, as AllocateSymmetric() needs.
  for (const auto& [kind, count] : counts) {
    at::Tensor& sums = sums_[kind];
    if (sums.defined() && sums.numel() >= count) continue;
    sums = at::Tensor();
    const auto& [type, index, dtype] = kind;
    const c10::Device device(type, index);
    const int64_t bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
    FSDP_ASSIGN_OR_RETURN(at::Tensor memory, column_.AllocateSymmetric(bytes));
    if (memory.device() != device) {
      memory = at::empty({bytes}, memory.options().device(device));
    }
    sums = memory.view(dtype);
  }
  return absl::OkStatus();
}

at::Tensor GradientMeans::SumOf(const Part& part) const {
  return sums_.at(part.kind).narrow(0, part.begin, leaves_[part.leaf].numel());
}

absl::Status GradientMeans::CopyGradient(const Part& part) const {
  const at::Tensor& gradient = leaves_[part.leaf].grad();
  const at::Tensor sum = SumOf(part);
  if (!gradient.defined()) {
    sum.zero_();
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(gradient, Use::kRead));
  sum.copy_(gradient.reshape(-1));
  return absl::OkStatus();
}

// Starts the sum of each stretch as soon as it is copied.
absl::Status GradientMeans::AddUp(absl::Time deadline) {
  std::vector<std::unique_ptr<comm::Work>> works;
  std::map<Kind, int64_t> sent;  // elements
  const auto send = [&](const Kind& kind, int64_t end) -> absl::Status {
    int64_t& begin = sent[kind];
    if (end == begin) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(
        auto work,
        column_.AllReduce(sums_.at(kind).narrow(0, begin, end - begin),
                          comm::ReduceOp::kSum, "gradients of replicas"));
    works.push_back(std::move(work));
    begin = end;
    return absl::OkStatus();
  };
  std::map<Kind, int64_t> copied;
  for (const Part& part : parts_) {
    FSDP_RETURN_IF_ERROR(CopyGradient(part));
    int64_t& end = copied[part.kind];
    end = part.begin + leaves_[part.leaf].numel();
    const int64_t bytes =
        (end - sent[part.kind]) *
        static_cast<int64_t>(c10::elementSize(std::get<2>(part.kind)));
    if (bytes < kBucketBytes) continue;
    FSDP_RETURN_IF_ERROR(send(part.kind, end));
  }
  for (const auto& [kind, end] : copied) FSDP_RETURN_IF_ERROR(send(kind, end));
  for (const auto& work : works) FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  return absl::OkStatus();
}

absl::Status GradientMeans::Apply() {
  const double count = column_.world_size();
  const NormalMode normal;
  return TorchToStatus(kWhat, [&] {
    for (const Part& part : parts_) {
      const at::Tensor& leaf = leaves_[part.leaf];
      const at::Tensor sum = SumOf(part);
      if (!leaf.grad().defined()) {
        leaf.mutable_grad() = at::div(sum, count).view(leaf.sizes());
        continue;
      }
      at::Tensor gradient = leaf.grad();
      const Resident resident =
          ValueOrThrow(Resident::Of(gradient, Use::kUpdate));
      gradient.copy_(sum.div_(count).view(gradient.sizes()));
    }
  });
}

}  // namespace fsdp::replicas
