#ifndef THIRD_PARTY_GLOO_CONTEXT_H_
#define THIRD_PARTY_GLOO_CONTEXT_H_

#include <chrono>

#include "gloo/transport/device.h"
#include "gloo/transport/unbound_buffer.h"

namespace gloo {

class Context {
 public:
  // Exported by libtorch_cpu.so.
  void setTimeout(std::chrono::milliseconds timeout);
  // Closes the connections to all peers; what is under way fails, there too.
  void closeConnections();
};

}  // namespace gloo

#endif  // THIRD_PARTY_GLOO_CONTEXT_H_
