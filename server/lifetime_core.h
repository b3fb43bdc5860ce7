// When an owner's process may end: its job's workers have all gone, it was told to, or the job broke. Decides
// only; Owner (owner.h) feeds it with membership events and the time.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace Atoll::server {

/// Not thread-safe.
class LifetimeCore {
 public:
  enum class Verdict {
    kServe,    ///< Workers are there.
    kDone,     ///< All workers have gone, at least one of them in order.
    kFailed,   ///< All workers died, or an owner died and the workers that were left have gone too (or
               ///< had their time), or we are no member any more.
    kStopped,  ///< Told to stop, and all workers have gone or the time for that is over.
  };

  /// `patience`: how long workers may go on after a stop was asked for, or after an owner died. `others`: how
  /// many members a whole job has besides us. Until all were there at one time the job has not begun: it
  /// serves, and who came and went before is forgotten.
  LifetimeCore(absl::Duration patience, int others) : patience_(patience), others_(others) {}

  /// Whether it was not known before.
  bool OnJoined(absl::string_view name, bool is_worker);
  void OnLeft(absl::string_view name);
  /// Died, or left because it failed.
  void OnDead(absl::string_view name, absl::string_view reason, absl::Time now);
  /// The job has declared us dead, or lost its coordinator: nobody will come or go any more.
  void OnExpelled(absl::string_view reason);
  /// Nobody coordinates the job any more, dead or left: as the death of another owner.
  void OnUnled(absl::string_view reason, absl::Time now);
  void OnStop(absl::Time now);

  Verdict At(absl::Time now) const;
  /// When At must be asked again though nothing happened. InfiniteFuture: never.
  absl::Time NextCheck() const { return give_up_; }
  /// What broke, for kFailed: names and reasons, in one line.
  std::string WhatFailed() const;
  int workers_here() const { return workers_; }

 private:
  void Forget(absl::string_view name);

  const absl::Duration patience_;
  const int others_;
  std::map<std::string, bool, std::less<>> here_;  // Name, and whether it is a worker.
  bool begun_ = false;
  int workers_ = 0;
  int left_in_order_ = 0;
  bool stopping_ = false;
  bool owner_died_ = false;
  bool expelled_ = false;
  absl::Time give_up_ = absl::InfiniteFuture();
  std::vector<std::string> deaths_;
};

}  // namespace Atoll::server
