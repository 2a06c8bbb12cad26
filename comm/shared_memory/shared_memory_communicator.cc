#include "comm/shared_memory/shared_memory_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/group/connect_together.h"
#include "comm/host/shared_host.h"
#include "comm/host/shared_segment.h"
#include "comm/shared_memory/shared_group.h"
#include "comm/split_members.h"

namespace fsdp::comm {
namespace {

constexpr int64_t kPage = 4096;

class SharedWork final : public Work {
 public:
  SharedWork(std::shared_ptr<SharedGroup> group,
             std::shared_ptr<SharedGroup::Operation> operation,
             absl::Duration timeout)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        timeout_(timeout) {}

  absl::Status Wait(absl::Time deadline) override {
    return group_->Wait(*operation_, /*inputs_free=*/true, deadline);
  }
  absl::Status WaitForResult(absl::Time deadline) override {
    return group_->Wait(*operation_, /*inputs_free=*/false, deadline);
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + timeout_);
  }
  int64_t number() const override { return SharedGroup::NumberOf(*operation_); }

 private:
  const std::shared_ptr<SharedGroup> group_;
  const std::shared_ptr<SharedGroup::Operation> operation_;
  const absl::Duration timeout_;
};

using Allocation = absl::StatusOr<std::unique_ptr<SharedSegment>>;

// Returns nowhere if there is no segment.
SegmentAddress AddressOf(const Allocation& segment) {
  const bool is_there = segment.ok() && *segment != nullptr;
  return is_there ? (*segment)->address() : SegmentAddress();
}

struct SeatRequest {
  SplitRequest split;
  int32_t world_rank;    // on the host
  SegmentAddress block;  // nowhere if it could not be allocated
};

class SharedMemoryCommunicator final : public Communicator {
 public:
  SharedMemoryCommunicator(std::shared_ptr<SharedHost> host,
                           std::shared_ptr<SharedGroup> group,
                           absl::Duration timeout)
      : host_(std::move(host)), group_(std::move(group)), timeout_(timeout) {}
  ~SharedMemoryCommunicator() override {
    if (unwinds()) group_->Abort(EndedByException());
    group_->Leave();
  }

  int rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  const RankNames& names() const override { return group_->names(); }
  absl::Duration default_timeout() const override { return timeout_; }
  std::string ToString() const override {
    return absl::StrCat("shared memory, ", Place());
  }

  bool HasCommonMemory() const override { return true; }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    FSDP_ASSIGN_OR_RETURN(auto segment, SharedSegment::Create(bytes));
    return host_->heap()->MakeTensor(std::move(segment), 0, bytes);
  }
  absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes) override {
    const std::string label = absl::StrCat(bytes, " bytes of common memory");
    const int64_t header =
        (SharedGroup::FenceBytes(world_size()) + kPage - 1) / kPage * kPage;
    Allocation segment = nullptr;
    if (rank() == 0) {
      segment = bytes < 0 ? Allocation(absl::InvalidArgumentError(absl::StrCat(
                                "cannot allocate ", bytes, " bytes")))
                          : SharedSegment::Create(header + bytes);
    }
    FSDP_ASSIGN_OR_RETURN(const std::vector<SegmentAddress> allocated,
                          Exchange(AddressOf(segment), label));
    if (!allocated[0].exists()) return NoMemory(segment.status(), label);
    if (rank() != 0) {
      segment = SharedSegment::Open(allocated[0]);
      if (segment.ok() && (*segment)->bytes() != header + bytes) {
        segment = absl::UnavailableError(
            absl::StrCat(names().Name(0), " has allocated ",
                         (*segment)->bytes(), " bytes of ", header + bytes));
      }
    }
    FSDP_RETURN_IF_ERROR(OkOnAll(segment.status(), label));
    const std::shared_ptr<SharedSegment> shared = *std::move(segment);
    CommonMemory common;
    common.fence = group_->MakeFence(shared);
    common.memory = host_->heap()->MakeTensor(shared, header, bytes);
    return common;
  }

  CreatedCommunicator Split(int color, int key) override {
    FSDP_RETURN_IF_ERROR(CheckColor(color));
    Allocation block = SharedGroup::CreateBlock();
    const SeatRequest own{{color, key}, host_->world_rank(), AddressOf(block)};
    FSDP_ASSIGN_OR_RETURN(const std::vector<SeatRequest> requests,
                          Exchange(own, "the group"));
    std::vector<SplitRequest> splits;
    splits.reserve(requests.size());
    for (const SeatRequest& request : requests) {
      if (!request.block.exists()) {
        return NoMemory(block.status(), "the group");
      }
      splits.push_back(request.split);
    }
    const std::shared_ptr<SharedSegment> kept = *std::move(block);
    const auto group = Join(MembersByColor(splits)[color], requests, kept);
    // It leaves the group where others cannot join.
    std::unique_ptr<Communicator> part;
    if (group.ok()) {
      part =
          std::make_unique<SharedMemoryCommunicator>(host_, *group, timeout_);
    }
    // After this all ranks have opened the block, and nobody else needs to.
    FSDP_RETURN_IF_ERROR(OkOnAll(group.status(), "the group"));
    (*group)->Seal();
    return part;
  }

  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const at::Tensor& input = args.in.defined() ? args.in : args.out;
    Call call = CallOf(args.collective, label, input, args.detail());
    if (!input.device().is_cpu()) {
      return absl::UnimplementedError(absl::StrCat(
          comm::ToString(call), " on ", Place(),
          ": shared memory takes CPU tensors, not ", input.device().str()));
    }
    FSDP_ASSIGN_OR_RETURN(
        auto operation,
        group_->Start(std::move(call), args, absl::Now() + timeout_));
    return std::make_unique<SharedWork>(group_, std::move(operation), timeout_);
  }
  StartedWork DoScaledSum(const CollectiveArgs& args,
                          absl::string_view label) override {
    return DoCollective(args, label);
  }

 private:
  // Joins the group of `ranks` with the `block` of this one.
  absl::StatusOr<std::shared_ptr<SharedGroup>> Join(
      const std::vector<int>& ranks, const std::vector<SeatRequest>& requests,
      const std::shared_ptr<SharedSegment>& block) {
    std::vector<SharedMember> members;
    for (const int member : ranks) {
      const SeatRequest& request = requests[member];
      if (request.world_rank < 0 || request.world_rank >= host_->num_ranks()) {
        return absl::UnavailableError(
            absl::StrCat("split on ", Place(), ": there is no rank ",
                         request.world_rank, " on the host"));
      }
      members.push_back({request.world_rank, request.block});
    }
    return SharedGroup::Create(host_, block, members, names().Part(ranks),
                               RankAmong(ranks, rank()));
  }

  // Returns OK if `mine` is OK on all ranks, and otherwise this rank's error or
  // that of the lowest rank that has one.
  absl::Status OkOnAll(const absl::Status& mine, absl::string_view label) {
    const absl::Status all = Agree(*this, mine, label, absl::Now() + timeout_);
    // The ranks do not return the same, so that it is not AsAgreed().
    return mine.ok() ? absl::Status(all.code(), all.message()) : mine;
  }
  // Returns the same where a rank has shown no memory: an error in any case.
  absl::Status NoMemory(const absl::Status& mine, absl::string_view label) {
    FSDP_RETURN_IF_ERROR(OkOnAll(mine, label));
    return absl::UnavailableError(absl::StrCat(
        label, " on ", Place(), ": a rank has shown no memory and no error"));
  }

  template <typename T>
  absl::StatusOr<std::vector<T>> Exchange(const T& value,
                                          absl::string_view label) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> values(world_size());
    const at::Tensor in = at::empty({static_cast<int64_t>(sizeof(T))},
                                    at::TensorOptions().dtype(at::kByte));
    std::memcpy(in.mutable_data_ptr(), &value, sizeof(T));
    const at::Tensor out = at::empty({in.numel() * world_size()}, in.options());
    const absl::Time deadline = absl::Now() + timeout_;
    FSDP_ASSIGN_OR_RETURN(
        auto operation,
        group_->Start({Collective::kSplit, std::string(label), "", 0, ""},
                      {Collective::kSplit, out, in}, deadline));
    FSDP_RETURN_IF_ERROR(
        group_->Wait(*operation, /*inputs_free=*/true, deadline));
    std::memcpy(values.data(), out.const_data_ptr(), out.nbytes());
    return values;
  }

  const std::shared_ptr<SharedHost> host_;
  const std::shared_ptr<SharedGroup> group_;
  const absl::Duration timeout_;
};

// A rank's entry in the store, which the others read.
struct Introduction {
  SegmentAddress mailbox;
  SegmentAddress block;
};

absl::Status CheckOneHost(const std::vector<std::string>& hosts,
                          const RankNames& names) {
  for (int rank = 1; rank < names.size(); ++rank) {
    if (hosts[rank] == hosts[0]) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(names.List({0, rank}),
                     " are not on one host, or are in containers that hide "
                     "their processes from each other"));
  }
  return absl::OkStatus();
}

// `introductions` are those that the ranks of `names` have written, by rank.
absl::StatusOr<std::shared_ptr<SharedGroup>> OpenAll(
    std::shared_ptr<SharedHost> host,
    const std::shared_ptr<SharedSegment>& block,
    const std::vector<std::string>& introductions, const RankNames& names) {
  std::vector<SegmentAddress> mailboxes;
  std::vector<SharedMember> members;
  for (const std::string& bytes : introductions) {
    const auto rank = static_cast<int>(members.size());
    Introduction introduction;
    if (bytes.size() != sizeof(introduction)) {
      return absl::UnavailableError(
          absl::StrCat(names.Name(rank), " introduces itself with ",
                       bytes.size(), " bytes instead of ", sizeof(introduction),
                       ": another program, or another build of this"));
    }
    std::memcpy(&introduction, bytes.data(), sizeof(introduction));
    members.push_back({rank, introduction.block});
    mailboxes.push_back(introduction.mailbox);
  }
  FSDP_RETURN_IF_ERROR(host->Connect(mailboxes));
  const int rank = host->world_rank();
  return SharedGroup::Create(std::move(host), block, members, names, rank);
}

}  // namespace

CreatedCommunicator CreateSharedMemoryCommunicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    const SharedMemoryOptions& options) {
  const absl::Time deadline = absl::Now() + options.timeout;
  FSDP_ASSIGN_OR_RETURN(const RankNames names,
                        RankNames::Of(world_size, options.world_ranks));
  FSDP_ASSIGN_OR_RETURN(
      std::vector<std::string> hosts,
      ExchangeByStore(store, "hosts", rank, names,
                      absl::StrCat(options.host, "/", HostIdentity()),
                      deadline));
  FSDP_RETURN_IF_ERROR(CheckOneHost(hosts, names));
  std::shared_ptr<SharedHost> host;
  std::shared_ptr<SharedSegment> block;
  const auto introduce = [&]() -> absl::StatusOr<std::string> {
    FSDP_ASSIGN_OR_RETURN(host, SharedHost::Create(rank));
    FSDP_ASSIGN_OR_RETURN(block, SharedGroup::CreateBlock());
    const Introduction own{host->mailbox_address(), block->address()};
    std::string bytes(sizeof(own), '\0');
    std::memcpy(bytes.data(), &own, sizeof(own));
    return bytes;
  };
  FSDP_ASSIGN_OR_RETURN(
      std::vector<std::string> values,
      ExchangeByStore(store, "segments", rank, names, introduce(), deadline));
  auto group = OpenAll(host, block, values, names);
  const std::string outcome(group.ok() ? "" : group.status().ToString());
  FSDP_ASSIGN_OR_RETURN(
      std::vector<std::string> outcomes,
      ExchangeByStore(store, "outcomes", rank, names, outcome, deadline));
  for (int peer = 0; peer < world_size; ++peer) {
    if (outcomes[peer].empty()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(names.Name(peer),
                     " cannot share memory with the others: ", outcomes[peer]));
  }
  (*group)->Seal();
  return std::make_unique<SharedMemoryCommunicator>(host, *std::move(group),
                                                    options.timeout);
}

}  // namespace fsdp::comm
