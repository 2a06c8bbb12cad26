// Places where a program synchronizes, and what is changed there to see whether
// somebody notices.
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
  kWake,
  kCall,  // a call of a function that updates
};

struct Site {
  Operation operation;
  std::memory_order order;
  std::string place;  // what it is in memory
};
using Sites = std::map<uintptr_t, Site>;

struct Mutation {
  std::string name;
  std::set<uintptr_t> sites;
  // Operations there, or in functions that are called there, have this order
  // instead, or, with `drops`, updates and wake-ups there do not happen.
  std::memory_order order = std::memory_order_relaxed;
  bool drops = false;
};

// Returns the function of a return address without namespaces and parameters,
// such as "Doorbell::Ring".
std::string FunctionAt(uintptr_t site);

// Returns all changes that weaken one operation by one step at one place in
// code of fsdp::comm, or at places that look alike, sorted by name. The name
// says the function, the operation and what it is done to.
std::vector<Mutation> AllMutations(const Sites& sites);

}  // namespace fsdp::interleavings

#endif  // TESTING_INTERLEAVINGS_MUTATION_H_
