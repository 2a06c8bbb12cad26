// Counts what a test's program asks of the heap, to see whether a parser is
// bounded. Replaces operator new of the whole program.
#ifndef BASE_TESTING_ALLOCATIONS_H_
#define BASE_TESTING_ALLOCATIONS_H_

#include <cstddef>

namespace fsdp::testing {

// Counts the bytes that all threads have asked for since the last Start().
class Allocations {
 public:
  static void Start();
  // Returns the most bytes that were asked for at once.
  static size_t Largest();
  // Returns the most bytes that were there at a time, beyond those at Start().
  static size_t Peak();
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_ALLOCATIONS_H_
