// An exception of the user's, which no code of ours throws or catches by type.
#ifndef BASE_TESTING_USERS_ERROR_H_
#define BASE_TESTING_USERS_ERROR_H_

#include <stdexcept>

namespace fsdp::testing {

class UsersError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_USERS_ERROR_H_
