#include "atoll/base/private_file.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace Atoll::base {

absl::Status CheckPrivate(const struct stat& info, const std::string& path) {
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        path, " is open to its group or to others (mode ", (info.st_mode >> 6) & 7, (info.st_mode >> 3) & 7,
        info.st_mode & 7, "): make it yours alone (chmod go= ", path, ")"));
  }
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to user ", info.st_uid,
                                                    ": it should belong to us (", geteuid(), ") or to root"));
  }
  return absl::OkStatus();
}

}  // namespace Atoll::base
