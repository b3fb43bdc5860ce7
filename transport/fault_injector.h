// An endpoint whose pipes misbehave, for tests of what stands on pipes: messages are lost, late, repeated, out of
// order, or stay away; connections end, or go on without carrying anything. A network does such things to the bytes
// under a pipe; TensorPipe's pipes show only some of them, and what is above should bear all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "atoll/base/executor.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::transport {

/// The chance that a written message meets each fault (at most one), from 0 to 1.
struct FaultPlan {
  double drop = 0;       ///< It is not sent; its writer is told that it was.
  double delay = 0;      ///< It and all behind it wait for `delay_by`.
  double repeat = 0;     ///< It is sent twice. Not the first message of a pipe.
  double reorder = 0;    ///< The next one overtakes it, if there is one within `delay_by`. Not the first.
  double cut = 0;        ///< The connection ends, for both sides.
  double half_open = 0;  ///< From now on nothing more goes out or comes in on this pipe; nobody is told.
  double stall = 0;      ///< As delay, for `stall_for`.
  absl::Duration delay_by = absl::Milliseconds(2);
  absl::Duration stall_for = absl::Milliseconds(200);
  uint64_t seed = 1;
};

/// How often each was done.
struct FaultCounts {
  std::atomic<uint64_t> drop{0}, delay{0}, repeat{0}, reorder{0}, cut{0}, half_open{0}, stall{0};
  uint64_t total() const;
};

/// Wraps `inner`: the same endpoint, with faults on what its side writes. Thread-safe, as that is.
class FaultInjector : public Endpoint {
 public:
  static std::shared_ptr<FaultInjector> Create(std::shared_ptr<Endpoint> inner, FaultPlan plan);
  /// For messages from now on; a pipe that is half open stays so.
  virtual void SetPlan(FaultPlan plan) = 0;
  virtual const FaultCounts& faults() const = 0;
};

}  // namespace Atoll::transport
