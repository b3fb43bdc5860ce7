// The secret that members of a job prove to each other. It comes from a file, from a variable, or, where all
// ranks are on one host, the launch makes one. Its bytes are never logged and stand in no error.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/base/fork.h"
#include "atoll/cluster/launch.h"

namespace Atoll::cluster {

inline constexpr size_t kMinKeyBytes = 16;
inline constexpr size_t kMaxKeyBytes = 4096;

/// InvalidArgument if the size is not from kMinKeyBytes to kMaxKeyBytes.
absl::Status CheckKey(absl::string_view key);

/// Reads a key; one newline at its end is not part of it. Errors name the path and what to do: NotFound,
/// PermissionDenied (the group or others may read or write it, or it belongs neither to us nor to root),
/// InvalidArgument (not a regular file; size).
absl::StatusOr<std::string> ReadKeyFile(const std::string& path);

/// A key file that the ranks of one host share, made by whichever comes first. Each holder has a shared lock
/// on it, which the kernel drops with the process; the last one out removes the file. What a killed job left
/// is used again. Keep it for as long as members may still join.
class SharedKeyFile {
 public:
  /// Makes or opens the key of `job` in `directory`, which is made (0700) if it is not there. Refuses a
  /// directory or file that is not ours alone (PermissionDenied). Safe against ranks that do the same now.
  static absl::StatusOr<std::unique_ptr<SharedKeyFile>> Open(const std::string& directory,
                                                             absl::string_view job);
  /// Removes the file if nobody else has it open. In a child of fork it only closes it.
  ~SharedKeyFile();
  SharedKeyFile(const SharedKeyFile&) = delete;
  SharedKeyFile& operator=(const SharedKeyFile&) = delete;

  const std::string& key() const { return key_; }
  const std::string& path() const { return path_; }

 private:
  SharedKeyFile(int directory, int file, std::string entry, std::string path, std::string key);

  const base::ForkMark fork_mark_;
  const int directory_;
  const int file_;
  const std::string entry_;
  const std::string path_;
  const std::string key_;
};

/// $XDG_RUNTIME_DIR/atoll where that is a directory of ours, else /tmp/atoll-<uid>.
std::string SharedKeyDirectory(const Environment& environment);

/// Sees to it that `launch` has a key: if it has none and OnOneHost, it gets the shared one of the host, and
/// the holder is returned (else null). InvalidArgument if it has none and the job is on several hosts.
absl::StatusOr<std::unique_ptr<SharedKeyFile>> EnsureJobKey(
    Launch& launch, const Environment& environment = ProcessEnvironment());

}  // namespace Atoll::cluster
