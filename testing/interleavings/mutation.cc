#include "testing/interleavings/mutation.h"

#include <utility>

#include "absl/debugging/symbolize.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace fsdp::interleavings {
namespace {

// Calls are only dropped if they update this place.
constexpr absl::string_view kRings = "rings";
constexpr absl::string_view kWatchedNamespace = "fsdp::comm::";

std::string Symbol(uintptr_t site) {
  char name[1024];
  // The site is after the call, and may belong to another function.
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  const void* call = reinterpret_cast<const void*>(site - 1);
  return absl::Symbolize(call, name, sizeof(name)) ? name : "?";
}

// Leaves out what is in brackets, except for (anonymous namespace).
std::string WithoutParameters(absl::string_view symbol) {
  std::string text;
  int depth = 0;
  for (char c : symbol) {
    if (c == '(' || c == '<' || c == '{') ++depth;
    if (depth == 0) text += c;
    if (c == ')' || c == '>' || c == '}') --depth;
  }
  return text;
}

void Add(std::map<std::string, Mutation>* found, std::string name,
         uintptr_t site, std::memory_order order, bool drops) {
  Mutation& mutation = (*found)[name];
  mutation.name = std::move(name);
  mutation.sites.insert(site);
  mutation.order = order;
  mutation.drops = drops;
}

// Returns orders that are one step weaker and differ for the operation.
std::vector<std::memory_order> Weaker(const Site& site) {
  switch (site.order) {
    case std::memory_order_seq_cst:
      if (site.operation == Operation::kLoad)
        return {std::memory_order_acquire};
      if (site.operation == Operation::kStore) {
        return {std::memory_order_release};
      }
      return {std::memory_order_acq_rel};
    case std::memory_order_acq_rel:
      return {std::memory_order_acquire, std::memory_order_release};
    case std::memory_order_acquire:
    case std::memory_order_consume:
    case std::memory_order_release:
      return {std::memory_order_relaxed};
    case std::memory_order_relaxed:
      break;
  }
  return {};
}

const char* NameOf(Operation operation) {
  constexpr const char* kNames[] = {"load", "store", "update", "wake", "call"};
  return kNames[static_cast<int>(operation)];
}

const char* NameOf(std::memory_order order) {
  constexpr const char* kNames[] = {"relaxed", "consume", "acquire",
                                    "release", "acq_rel", "seq_cst"};
  return kNames[static_cast<int>(order)];
}

}  // namespace

std::string FunctionAt(uintptr_t site) {
  std::string name = absl::StrReplaceAll(
      WithoutParameters(absl::StrReplaceAll(
          Symbol(site), {{"(anonymous namespace)::", ""}, {" const", ""}})),
      {{"fsdp::comm::", ""},
       {"fsdp::interleavings::", ""},
       {"::::operator", "'s lambda"}});
  // For clang it is "Start::$_2::operator".
  const size_t lambda = name.find("::$_");
  if (lambda != std::string::npos) {
    name = absl::StrCat(name.substr(0, lambda), "'s lambda");
  }
  return name;
}

std::vector<Mutation> AllMutations(const Sites& sites) {
  std::map<std::string, Mutation> found;
  for (const auto& [address, site] : sites) {
    if (!absl::StartsWith(Symbol(address), kWatchedNamespace)) continue;
    const std::string what = absl::StrCat(
        FunctionAt(address), ": ", NameOf(site.operation), " of ", site.place);
    if (site.operation == Operation::kCall && site.place != kRings) continue;
    if (site.operation == Operation::kWake ||
        site.operation == Operation::kCall) {
      Add(&found, absl::StrCat(what, " -> nothing"), address, site.order, true);
      continue;
    }
    for (std::memory_order weaker : Weaker(site)) {
      Add(&found,
          absl::StrCat(what, ", ", NameOf(site.order), " -> ", NameOf(weaker)),
          address, weaker, false);
    }
  }
  std::vector<Mutation> mutations;
  mutations.reserve(found.size());
  for (auto& [name, mutation] : found) mutations.push_back(std::move(mutation));
  return mutations;
}

}  // namespace fsdp::interleavings
