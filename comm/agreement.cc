#include "comm/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

// Longer texts are cut to keep messages readable.
constexpr size_t kMaxMessage = 4096;
constexpr size_t kMaxLine = 200;
// The key of the payload by which IsAgreed() knows a status.
constexpr char kAgreed[] = "libtorch_fsdp/agreed";
// The longest text that is broadcast, in bytes.
constexpr int64_t kMaxText = int64_t{1} << 30;

std::string Cut(absl::string_view text, size_t max_size) {
  if (text.size() <= max_size) return std::string(text);
  return absl::StrCat(text.substr(0, max_size), "...");
}

// `Number` is int64_t or double.
template <typename Number>
absl::StatusOr<std::vector<Number>> GatherNumbers(Communicator& communicator,
                                                  Number mine,
                                                  absl::string_view what,
                                                  absl::Time deadline) {
  const at::Tensor in =
      at::full({1}, mine, c10::CppTypeToScalarType<Number>::value);
  const at::Tensor out = at::empty({communicator.world_size()}, in.options());
  FSDP_ASSIGN_OR_RETURN(auto work, communicator.AllGather(out, in, what));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  const auto* numbers = out.const_data_ptr<Number>();
  return std::vector<Number>(numbers, numbers + out.numel());
}

// Describes the first line in which the texts of two ranks differ.
std::string FirstDifference(absl::string_view first, absl::string_view a,
                            absl::string_view other, absl::string_view b) {
  const std::vector<absl::string_view> a_lines = absl::StrSplit(a, '\n');
  const std::vector<absl::string_view> b_lines = absl::StrSplit(b, '\n');
  const size_t common = std::min(a_lines.size(), b_lines.size());
  size_t i = 0;
  while (i < common && a_lines[i] == b_lines[i]) ++i;
  const auto line = [i](const std::vector<absl::string_view>& lines) {
    return i < lines.size() ? absl::StrCat("\"", Cut(lines[i], kMaxLine), "\"")
                            : std::string("nothing");
  };
  return absl::StrCat("line ", i + 1, " is ", line(a_lines), " on ", first,
                      " and ", line(b_lines), " on ", other);
}

absl::StatusOr<std::vector<double>> Gather(Communicator& communicator,
                                           double value,
                                           absl::string_view label) {
  return GatherNumbers(communicator, value, label,
                       absl::Now() + communicator.default_timeout());
}

}  // namespace

absl::Status BroadcastTensor(Communicator& communicator,
                             const at::Tensor& tensor, int root,
                             absl::string_view what, absl::Time deadline) {
  FSDP_ASSIGN_OR_RETURN(const auto work,
                        communicator.Broadcast(tensor, root, what));
  return work->Wait(deadline);
}

absl::StatusOr<std::string> BroadcastString(Communicator& communicator,
                                            const std::string& text, int root,
                                            absl::string_view what,
                                            absl::Time deadline) {
  const at::Tensor size =
      at::full({1}, static_cast<int64_t>(text.size()), at::kLong);
  FSDP_RETURN_IF_ERROR(
      BroadcastTensor(communicator, size, root, what, deadline));
  const int64_t count = *size.const_data_ptr<int64_t>();
  if (count == 0) return std::string();
  if (count < 0 || count > kMaxText) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": ", communicator.names().Name(root), " announces a text of ",
        count, " bytes, where ", kMaxText, " are the most"));
  }
  // If one rank plays all of them, its own text is the root's.
  const at::Tensor bytes = at::zeros({count}, at::kByte);
  char* data = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
  std::copy_n(text.data(), std::min(text.size(), static_cast<size_t>(count)),
              data);
  FSDP_RETURN_IF_ERROR(
      BroadcastTensor(communicator, bytes, root, what, deadline));
  return std::string(data, static_cast<size_t>(count));
}

absl::Status Agree(Communicator& communicator, const absl::Status& mine,
                   absl::string_view what, absl::Time deadline) {
  const absl::StatusOr<std::vector<int64_t>> codes =
      GatherNumbers<int64_t>(communicator, mine.raw_code(), what, deadline);
  // This rank's own error says more than that the peers could not be told.
  if (!codes.ok()) return mine.ok() ? codes.status() : mine;
  const auto failed = std::find_if(codes->begin(), codes->end(),
                                   [](int64_t code) { return code != 0; });
  if (failed == codes->end()) return absl::OkStatus();
  const int rank = static_cast<int>(failed - codes->begin());
  const absl::StatusOr<std::string> message = BroadcastString(
      communicator, Cut(mine.message(), kMaxMessage), rank, what, deadline);
  if (!message.ok()) return mine.ok() ? message.status() : mine;
  return AsAgreed(absl::Status(
      static_cast<absl::StatusCode>(*failed),
      absl::StrCat(communicator.names().Name(rank), ": ", *message)));
}

bool IsAgreed(const absl::Status& status) {
  return status.GetPayload(kAgreed).has_value();
}

absl::Status AsAgreed(absl::Status error) {
  error.SetPayload(kAgreed, absl::Cord());
  return error;
}

absl::Status CheckSame(Communicator& communicator, const std::string& text,
                       absl::string_view what, absl::Time deadline) {
  FSDP_ASSIGN_OR_RETURN(
      const std::vector<int64_t> hashes,
      GatherNumbers(communicator, static_cast<int64_t>(Fnv1a(text)), what,
                    deadline));
  std::vector<int> different;
  for (size_t rank = 0; rank < hashes.size(); ++rank) {
    if (hashes[rank] != hashes[0]) different.push_back(static_cast<int>(rank));
  }
  if (different.empty()) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(
      const std::string expected,
      BroadcastString(communicator, text, /*root=*/0, what, deadline));
  FSDP_ASSIGN_OR_RETURN(
      const std::string actual,
      BroadcastString(communicator, text, different.front(), what, deadline));
  const RankNames& names = communicator.names();
  const std::string first = names.Name(0);
  return AsAgreed(absl::InvalidArgumentError(
      absl::StrCat(what, " differ between ranks: ", names.List(different),
                   " from ", first, "; ",
                   FirstDifference(first, expected,
                                   names.Name(different.front()), actual))));
}

absl::StatusOr<std::vector<std::string>> GatherStrings(
    Communicator& communicator, absl::string_view mine, absl::string_view what,
    absl::Time deadline) {
  const auto own = static_cast<int64_t>(mine.size());
  FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                        GatherNumbers(communicator, own, what, deadline));
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  if (longest == 0) return std::vector<std::string>(sizes.size());
  if (longest > kMaxText || *std::min_element(sizes.begin(), sizes.end()) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": a rank announces a text of ", longest,
                     " bytes, where ", kMaxText, " are the most"));
  }
  const at::Tensor in = at::zeros({longest}, at::kByte);
  std::memcpy(in.mutable_data_ptr<uint8_t>(), mine.data(), mine.size());
  const int ranks = communicator.world_size();
  const at::Tensor out = at::empty({longest * ranks}, at::kByte);
  FSDP_ASSIGN_OR_RETURN(auto work, communicator.AllGather(out, in, what));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  const char* const bytes =
      reinterpret_cast<const char*>(out.const_data_ptr<uint8_t>());
  std::vector<std::string> texts;
  texts.reserve(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    texts.emplace_back(bytes + rank * longest, sizes[rank]);
  }
  return texts;
}

absl::Status Barrier(Communicator& communicator, absl::string_view what,
                     absl::Time deadline) {
  return GatherNumbers<int64_t>(communicator, 0, what, deadline).status();
}

absl::StatusOr<double> Mean(Communicator& communicator, double value) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> values,
                        Gather(communicator, value, "the mean of a number"));
  return std::accumulate(values.begin(), values.end(), 0.0) /
         communicator.world_size();
}

absl::StatusOr<double> Sum(Communicator& communicator, double value) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> values,
                        Gather(communicator, value, "the sum of a number"));
  return std::accumulate(values.begin(), values.end(), 0.0);
}

absl::StatusOr<double> Max(Communicator& communicator, double value) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<double> values,
                        Gather(communicator, value, "the maximum of a number"));
  double max = values[0];
  for (double other : values) {
    if (std::isnan(other)) return other;
    if (other > max) max = other;
  }
  return max;
}

}  // namespace fsdp::comm
