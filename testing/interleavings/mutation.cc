#include "testing/interleavings/mutation.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

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
  switch (operation) {
    case Operation::kLoad:
      return "load";
    case Operation::kStore:
      return "store";
    case Operation::kUpdate:
      return "update";
    case Operation::kWait:
      return "wait";
    case Operation::kWake:
      return "wake";
    case Operation::kCall:
      return "call";
  }
  return "?";
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

const char* Name(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed:
      return "relaxed";
    case std::memory_order_consume:
      return "consume";
    case std::memory_order_acquire:
      return "acquire";
    case std::memory_order_release:
      return "release";
    case std::memory_order_acq_rel:
      return "acq_rel";
    case std::memory_order_seq_cst:
      return "seq_cst";
  }
  return "?";
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
    if (site.operation == Operation::kWait) continue;
    for (std::memory_order weaker : Weaker(site)) {
      Add(&found,
          absl::StrCat(what, ", ", Name(site.order), " -> ", Name(weaker)),
          address, weaker, false);
    }
  }
  std::vector<Mutation> mutations;
  mutations.reserve(found.size());
  for (auto& [name, mutation] : found) mutations.push_back(std::move(mutation));
  return mutations;
}

}  // namespace fsdp::interleavings
