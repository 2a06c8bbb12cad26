// A keeper of replicas in this process.
#ifndef REPLICAS_TESTING_TEST_KEEPER_H_
#define REPLICAS_TESTING_TEST_KEEPER_H_

#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"

namespace fsdp::replicas::testing {

// Throws what goes wrong.
class TestKeeper {
 public:
  // At `port`; 0: at any.
  explicit TestKeeper(int port = 0) {
    comm::Listener listener = ValueOrThrow(comm::Listen("127.0.0.1", port));
    place_.master_addr = place_.keeper_addr = "127.0.0.1";
    place_.master_port = place_.keeper_port = listener.port;
    place_.secret = "of the test";
    place_.kept_store = true;
    server_ = ValueOrThrow(
        comm::StoreServer::Start(std::move(listener.fd), place_.secret));
  }

  // Says where groups meet, under a prefix that is still to be set.
  const comm::Environment& place() const { return place_; }

  // Returns what rank 0 of 1 in the first life of a replica has.
  comm::Environment EnvironmentOf(int replica, int replicas) const {
    comm::Environment environment = place_;
    environment.replica = replica;
    environment.replicas = replicas;
    environment.replica_incarnation = 1;
    return environment;
  }

  void End() { server_ = nullptr; }

 private:
  comm::Environment place_;
  std::unique_ptr<comm::StoreServer> server_;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_TESTING_TEST_KEEPER_H_
