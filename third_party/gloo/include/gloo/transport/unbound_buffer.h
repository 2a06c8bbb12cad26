#ifndef THIRD_PARTY_GLOO_TRANSPORT_UNBOUND_BUFFER_H_
#define THIRD_PARTY_GLOO_TRANSPORT_UNBOUND_BUFFER_H_

namespace gloo::transport {

// Held by a std::unique_ptr, hence the destructor: Gloo's first virtual
// function as well.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace gloo::transport

#endif  // THIRD_PARTY_GLOO_TRANSPORT_UNBOUND_BUFFER_H_
