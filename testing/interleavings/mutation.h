// Places in a program where it synchronizes, and what is changed there to see
// whether somebody notices.
#ifndef TESTING_INTERLEAVINGS_MUTATION_H_
#define TESTING_INTERLEAVINGS_MUTATION_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fsdp::interleavings {

enum class Operation {
  kLoad,
  kStore,
  kUpdate,
  kWait,  // futex
  kWake,
  kCall,  // of a function that updates
};

// Return addresses, with what was seen there.
struct Site {
  Operation operation;
  std::memory_order order;
  std::string place;  // in memory
};
using Sites = std::map<uintptr_t, Site>;

struct Mutation {
  std::string name;
  std::set<uintptr_t> sites;
  // What happens there, or in functions that are called there: operations have
  // this order instead, or, with `drops`, updates and wake-ups do not happen.
  std::memory_order order = std::memory_order_relaxed;
  bool drops = false;
};

// "Doorbell::Ring", without namespaces and parameters, of a return address.
std::string FunctionAt(uintptr_t site);

const char* Name(std::memory_order order);

// All that weakens one operation by one step at one place that code of
// fsdp::comm has, alike where two of its places look alike: named by the
// function, the operation and what it is done to. In the order of names.
std::vector<Mutation> AllMutations(const Sites& sites);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_MUTATION_H_
