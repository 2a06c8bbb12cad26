#include "comm/hierarchical/hierarchical_collectives.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/hierarchical/host_layout.h"

namespace fsdp::comm {
namespace {

using Started = HierarchicalGroup::Started;

// Up to here every rail moves all of an all-reduce or a broadcast: a step less
// matters more than the bytes.
constexpr int64_t kSmall = 32 << 10;
constexpr int64_t kSliceElements = 64;  // edges of slices are multiples of it

bool IsSmall(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes()) <= kSmall;
}

// What the rail of `place` moves of a tensor.
at::Tensor Slice(const at::Tensor& tensor, const HostLayout& layout,
                 int place) {
  if (IsSmall(tensor)) return tensor;
  const int64_t blocks = (tensor.numel() + kSliceElements - 1) / kSliceElements;
  const auto edge = [&](int p) {
    return std::min(tensor.numel(),
                    blocks * p / layout.ranks_per_host * kSliceElements);
  };
  return tensor.narrow(0, edge(place), edge(place + 1) - edge(place));
}

at::Tensor PartOf(const at::Tensor& tensor, int index, int count) {
  const int64_t size = tensor.numel() / count;
  return tensor.narrow(0, index * size, size);
}

// Every place of the host sends its slice to the others of the host.
std::vector<Started> ExchangeSlices(HierarchicalGroup& group,
                                    const at::Tensor& tensor,
                                    const std::string& label) {
  std::vector<Started> works;
  if (IsSmall(tensor)) return works;
  const HostLayout& layout = group.layout();
  for (int place = 0; place < layout.ranks_per_host; ++place) {
    works.push_back(
        {&group.host(),
         group.host().Broadcast(Slice(tensor, layout, place), place, label)});
  }
  return works;
}

std::vector<Started> One(const Communicator& part,
                         absl::StatusOr<std::unique_ptr<Work>> work) {
  std::vector<Started> works;
  works.push_back({&part, std::move(work)});
  return works;
}

}  // namespace

absl::StatusOr<at::Tensor> HierarchicalCollectives::Scratch(
    HierarchicalGroup& group, const at::Tensor& like, int64_t numel) {
  const int64_t bytes = numel * static_cast<int64_t>(like.element_size());
  if (!scratch_.defined() || scratch_.numel() < bytes) {
    scratch_.reset();
    FSDP_ASSIGN_OR_RETURN(scratch_, group.host().AllocateSymmetric(bytes));
  }
  return scratch_.narrow(0, 0, bytes).view(like.scalar_type());
}

absl::Status HierarchicalCollectives::AllGather(HierarchicalGroup& group,
                                                const at::Tensor& out,
                                                const at::Tensor& in,
                                                const std::string& label) {
  const int hosts = group.layout().num_hosts;
  const int own_host = group.layout().host(group.rank());
  FSDP_ASSIGN_OR_RETURN(const at::Tensor sent,
                        Scratch(group, in, in.numel() * hosts));
  auto between_hosts = group.rail().AllGather(sent, in, label);
  const auto gather = [&](int host, const at::Tensor& from) {
    return Started{&group.host(), group.host().AllGather(
                                      PartOf(out, host, hosts), from, label)};
  };
  // Meanwhile, what is here already.
  std::vector<Started> works;
  works.push_back(gather(own_host, in));
  works.push_back({&group.rail(), std::move(between_hosts)});
  FSDP_RETURN_IF_ERROR(group.Finish(std::move(works)));
  works.clear();
  for (int host = 0; host < hosts; ++host) {
    if (host == own_host) continue;
    works.push_back(gather(host, PartOf(sent, host, hosts)));
  }
  return group.Finish(std::move(works));
}

absl::Status HierarchicalCollectives::ReduceScatter(HierarchicalGroup& group,
                                                    const at::Tensor& out,
                                                    const at::Tensor& in,
                                                    ReduceOp op,
                                                    const std::string& label) {
  const int hosts = group.layout().num_hosts;
  FSDP_ASSIGN_OR_RETURN(const at::Tensor sums,
                        Scratch(group, out, out.numel() * hosts));
  std::vector<Started> works;
  works.reserve(hosts);
  for (int host = 0; host < hosts; ++host) {
    works.push_back({&group.host(), group.host().ReduceScatter(
                                        PartOf(sums, host, hosts),
                                        PartOf(in, host, hosts), op, label)});
  }
  FSDP_RETURN_IF_ERROR(group.Finish(std::move(works)));
  return group.Finish(
      One(group.rail(), group.rail().ReduceScatter(out, sums, op, label)));
}

// Inside the host first: each place gets what its rail takes to the other
// hosts, in the order in which they put it into `out`.
absl::Status HierarchicalCollectives::AllToAll(HierarchicalGroup& group,
                                               const at::Tensor& out,
                                               const at::Tensor& in,
                                               const std::string& label) {
  const int hosts = group.layout().num_hosts;
  FSDP_ASSIGN_OR_RETURN(const at::Tensor sent, Scratch(group, in, in.numel()));
  std::vector<Started> works;
  works.reserve(hosts);
  for (int host = 0; host < hosts; ++host) {
    works.push_back(
        {&group.host(), group.host().AllToAll(PartOf(sent, host, hosts),
                                              PartOf(in, host, hosts), label)});
  }
  FSDP_RETURN_IF_ERROR(group.Finish(std::move(works)));
  return group.Finish(
      One(group.rail(), group.rail().AllToAll(out, sent, label)));
}

absl::Status HierarchicalCollectives::AllReduce(HierarchicalGroup& group,
                                                const at::Tensor& tensor,
                                                ReduceOp op,
                                                const std::string& label) {
  const int places = group.layout().ranks_per_host;
  const int place = group.layout().place(group.rank());
  Communicator& host = group.host();
  const auto reduce_between_hosts = [&](const at::Tensor& part) {
    return group.Finish(
        One(group.rail(), group.rail().AllReduce(part, op, label)));
  };
  if (!IsSmall(tensor) && tensor.numel() % places == 0) {
    const at::Tensor part = PartOf(tensor, place, places);
    FSDP_RETURN_IF_ERROR(
        group.Finish(One(host, host.ReduceScatter(part, tensor, op, label))));
    FSDP_RETURN_IF_ERROR(reduce_between_hosts(part));
    return group.Finish(One(host, host.AllGather(tensor, part, label)));
  }
  FSDP_RETURN_IF_ERROR(
      group.Finish(One(host, host.AllReduce(tensor, op, label))));
  FSDP_RETURN_IF_ERROR(
      reduce_between_hosts(Slice(tensor, group.layout(), place)));
  return group.Finish(ExchangeSlices(group, tensor, label));
}

absl::Status HierarchicalCollectives::Broadcast(HierarchicalGroup& group,
                                                const at::Tensor& tensor,
                                                int root,
                                                const std::string& label) {
  const HostLayout& layout = group.layout();
  const bool is_from_here = layout.host(group.rank()) == layout.host(root);
  const at::Tensor slice = Slice(tensor, layout, layout.place(group.rank()));
  if (is_from_here) {
    FSDP_RETURN_IF_ERROR(group.Finish(
        One(group.host(),
            group.host().Broadcast(tensor, layout.place(root), label))));
  }
  // Hosts that name different ranks of one host differ in the label.
  FSDP_RETURN_IF_ERROR(group.Finish(
      One(group.rail(),
          group.rail().Broadcast(slice, layout.host(root),
                                 absl::StrCat(label, ", root ", root)))));
  if (is_from_here) return absl::OkStatus();
  return group.Finish(ExchangeSlices(group, tensor, label));
}

}  // namespace fsdp::comm
