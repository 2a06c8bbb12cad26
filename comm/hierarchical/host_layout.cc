#include "comm/hierarchical/host_layout.h"

#include <map>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace fsdp::comm {
namespace {

bool IsWord(char c) { return absl::ascii_isalnum(c) || c == '_'; }

// Takes a number from the front of `text`; -1, and nothing, where there is
// none.
int ConsumeNumber(absl::string_view* text) {
  size_t size = 0;
  while (size < text->size() && absl::ascii_isdigit((*text)[size])) ++size;
  int number = -1;
  const bool ends = size == text->size() || !IsWord((*text)[size]);
  if (!ends || !absl::SimpleAtoi(text->substr(0, size), &number)) return -1;
  text->remove_prefix(size);
  return number;
}

// Rank r of `size` is `name(r)` of `world_size`.
std::string Renumber(absl::string_view text, int size, int world_size,
                     absl::FunctionRef<int(int)> name) {
  constexpr absl::string_view kRank = "rank ";
  std::string result;
  while (true) {
    const size_t found = text.find(kRank);
    if (found == absl::string_view::npos) break;
    const bool is_word = found == 0 || !IsWord(text[found - 1]);
    absl::StrAppend(&result, text.substr(0, found + kRank.size()));
    text.remove_prefix(found + kRank.size());
    absl::string_view rest = text;
    const int rank = is_word ? ConsumeNumber(&rest) : -1;
    if (rank < 0 || rank >= size) continue;
    absl::StrAppend(&result, name(rank));
    text = rest;
    if (!absl::ConsumePrefix(&rest, " of ") || ConsumeNumber(&rest) != size) {
      continue;
    }
    absl::StrAppend(&result, " of ", world_size);
    text = rest;
  }
  return absl::StrCat(result, text);
}

}  // namespace

std::string HostLayout::NameHostRanks(int rank, absl::string_view text) const {
  return Renumber(text, ranks_per_host, num_hosts * ranks_per_host,
                  [&](int p) { return host(rank) * ranks_per_host + p; });
}

std::string HostLayout::NameRailRanks(int rank, absl::string_view text) const {
  return Renumber(text, num_hosts, num_hosts * ranks_per_host,
                  [&](int h) { return h * ranks_per_host + place(rank); });
}

absl::StatusOr<HostLayout> ArrangeHosts(absl::Span<const std::string> hosts) {
  const auto num_ranks = static_cast<int>(hosts.size());
  struct Host {
    int first;
    int count = 0;
  };
  std::map<std::string, Host> known;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Host& host = known.try_emplace(hosts[rank], Host{rank}).first->second;
    if (rank != host.first + host.count) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the ranks of a host do not follow each other: ranks ", host.first,
          " and ", rank, " are on one, rank ", rank - 1, " is on another"));
    }
    ++host.count;
  }
  HostLayout layout;
  layout.num_hosts = static_cast<int>(known.size());
  layout.ranks_per_host = num_ranks / layout.num_hosts;
  for (const auto& [name, host] : known) {
    if (host.count == layout.ranks_per_host) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("the hosts do not have as many ranks each: that of rank ",
                     host.first, " has ", host.count, " of ", num_ranks,
                     " ranks on ", layout.num_hosts, " hosts"));
  }
  return layout;
}

}  // namespace fsdp::comm
