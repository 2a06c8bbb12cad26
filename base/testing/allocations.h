// What a test's program asks the heap for, to see whether a parser is bounded.
// Replaces operator new of the whole program.
#ifndef BASE_TESTING_ALLOCATIONS_H_
#define BASE_TESTING_ALLOCATIONS_H_

#include <cstddef>

namespace fsdp::testing {

// Since the last Start(), of all threads.
class Allocations {
 public:
  static void Start();
  // That were asked for at once.
  static size_t Largest();
  // The most that were there at a time, beyond those of Start().
  static size_t Peak();
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_ALLOCATIONS_H_
