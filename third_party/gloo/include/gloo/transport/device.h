#ifndef THIRD_PARTY_GLOO_TRANSPORT_DEVICE_H_
#define THIRD_PARTY_GLOO_TRANSPORT_DEVICE_H_

#include <memory>

namespace gloo::transport {

class Device;

}  // namespace gloo::transport

#endif  // THIRD_PARTY_GLOO_TRANSPORT_DEVICE_H_
