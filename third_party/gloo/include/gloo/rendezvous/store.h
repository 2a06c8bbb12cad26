#ifndef THIRD_PARTY_GLOO_RENDEZVOUS_STORE_H_
#define THIRD_PARTY_GLOO_RENDEZVOUS_STORE_H_

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

// Base of c10d::ProcessGroupGloo::GlooStore. Gloo's own has more virtual
// functions: an object made here would not fit the library. The constructor is
// therefore not defined anywhere, so that making one does not link.
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;

 protected:
  Store();
};

}  // namespace gloo::rendezvous

#endif  // THIRD_PARTY_GLOO_RENDEZVOUS_STORE_H_
