// Few combinations in which each two choices meet.
#ifndef CHECKPOINT_TESTS_COVERING_H_
#define CHECKPOINT_TESTS_COVERING_H_

#include <vector>

namespace fsdp::checkpoint::testing {

// Rows of one choice, from 0, for each of `levels`, how many there are, such
// that any choices of any two levels are in one of the rows. The same each
// time.
std::vector<std::vector<int>> CoverPairs(const std::vector<int>& levels);

// All of them; the last level varies fastest.
std::vector<std::vector<int>> AllOf(const std::vector<int>& levels);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTS_COVERING_H_
