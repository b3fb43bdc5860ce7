// Host names, off the loop: the system's resolver may take half a minute, and nothing interrupts it.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport {

/// Thread-safe. Its threads ("atoll-resolve") are there while there are names to ask for, and detached: one
/// that hangs in the system's resolver holds nothing of ours, so nobody needs to wait for it.
class Resolver {
 public:
  struct Target {
    std::string text;  ///< As it was given.
    SocketAddress address;
  };
  struct Result {
    std::deque<Target> targets;          ///< In the order given.
    std::vector<absl::Status> failures;  ///< Of the addresses that lead nowhere, and why.
  };
  using Done = absl::AnyInvocable<void(Result)>;

  Resolver();
  ~Resolver() { Close(); }

  /// Those of `addresses` that need no asking (the others as failures); false if there are others.
  static bool Literal(const std::vector<std::string>& addresses, Result* result);
  /// Calls `done` on a thread of its own, unless Close comes first: then it is destroyed.
  void Resolve(std::vector<std::string> addresses, Done done);
  /// Drops all callbacks. Idempotent, does not wait.
  void Close();

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace Atoll::transport
