// Files that hold secrets.
#pragma once

#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"

namespace Atoll::base {

/// PermissionDenied, with what to do, if the group or others may do anything with the file or directory `path`,
/// of which `info` is, or if it belongs neither to us nor to root.
absl::Status CheckPrivate(const struct stat& info, const std::string& path);

}  // namespace Atoll::base
