// One side of a case, as bench/run.py drives it over standard input and output.
//
//   server  prints its address (one line) once it can be reached, and ends with its standard input
//   caller  prints "ready"; for each line "SECONDS" it repeats its work for so long and prints one line of
//           JSON: {"begin", "end", "ops", "times"}. Times are of the system's monotonic clock, so that those of
//           several callers compare; "times" counts operations by log(1.02) of their nanoseconds.
//
// Everything that is checked or made ready is outside of the timed part. A side that finds wrong bytes ends.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace Atoll::bench {

inline constexpr size_t kArenaBytes = 128 << 20;  ///< Where each process of a side receives, and sends from.
inline constexpr size_t kChunkBytes = 4 << 20;    ///< Of what goes in chunks.
inline constexpr size_t kBulkBytes = 64 << 20;    ///< Of one push or pull.
inline constexpr size_t kSmallBytes = 4 << 10;
inline constexpr int kCallsInFlight = 256;
inline constexpr int kCallsInFlightEach = 16;  ///< Of many callers.

/// Ends the process with a text.
[[noreturn]] void Die(const std::string& text);
void DieOf(const absl::Status& status);

/// What a caller does again and again. All but `once` may be null.
struct Work {
  std::function<void(uint64_t seed)> before;  ///< Makes new content; untimed.
  std::function<void()> once;                 ///< One operation, or one more in flight.
  std::function<void()> finish;               ///< Awaits those in flight; timed.
  std::function<void()> check;                ///< Dies unless the content has arrived; untimed.
};
/// Until standard input ends.
void Drive(const Work& work);
/// A server's side of it.
void Announce(const std::string& address);

/// Ends this process with the one that started it, stops it from being told of closed pipes. First in main.
void Begin();

/// Content that no other seed has at any place.
void Fill(char* data, size_t bytes, uint64_t seed);
/// Dies if `data` is not that.
void CheckFilled(const char* data, size_t bytes, uint64_t seed);

/// Page-aligned memory of kArenaBytes, in place, for the life of the process.
char* Arena();

/// The bytes of the parameters of a ResNet-50: 161 tensors, 102 MB.
std::vector<size_t> ResNet50Bytes();

/// A fixed-size value as a body, and back from the front of one.
template <class T>
std::string Pack(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(T));
}
/// Dies if `body` is shorter.
void CopyFront(absl::string_view body, void* to, size_t bytes);
template <class T>
T Unpack(absl::string_view body) {
  T value;
  CopyFront(body, &value, sizeof(T));
  return value;
}
/// Where in the arenas something lies.
struct Place {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t seed = 0;
};

}  // namespace Atoll::bench
