// Names that travel and are shown: of jobs, members and roles.
#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"

namespace Atoll::base {

inline constexpr size_t kMaxMemberNameBytes = 127;
/// For errors: what a word is of.
inline constexpr absl::string_view kWordLetters = "letters, digits and '_', '.', ':', '-'";

/// 1 to `max_bytes` of kWordLetters: it may stand in logs, errors, lists, and names of files and sockets.
bool IsWord(absl::string_view text, size_t max_bytes);

}  // namespace Atoll::base
