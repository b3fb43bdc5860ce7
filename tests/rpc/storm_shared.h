// What storm_test.cc and the members that it kills (storm_helper.cc) share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

inline constexpr int64_t kStormBytes = 64 << 20;
inline constexpr unsigned char kStormByte = 0x5a;
inline constexpr int kStormCalls = 1 << 16;  // In one run of the test.

/// A member to be started: how it is reached, and whom it pushes to.
struct StormVictim {
  int way = 0;
  std::string name = "victim";
  int descriptors = 0;  ///< What it may have; 0: as many as the tests.
  int pushes = 0;
  Peer peer;
};

/// The ways that bytes can go between two processes of a host.
inline constexpr const char* kStormWays[] = {"unix and cma", "unix", "tcp", "tcp with TLS"};

inline transport::EndpointOptions StormEndpoint(const base::MemberId& self, int way) {
  transport::EndpointOptions options;
  options.job = "storm";
  options.self = self;
  options.key.bytes = "a key of at least sixteen bytes";
  options.enable_unix = way < 2;
  options.enable_cma = way == 0;
  options.enable_cuda = false;
  if (way == 3) options.tls.mode = base::TlsMode::kPsk;
  return options;
}

}  // namespace Atoll::rpc
