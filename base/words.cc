#include "atoll/base/words.h"

#include <algorithm>

#include "absl/strings/ascii.h"

namespace Atoll::base {

bool IsWord(absl::string_view text, size_t max_bytes) {
  return !text.empty() && text.size() <= max_bytes &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '_' || c == '.' || c == ':' || c == '-';
         });
}

}  // namespace Atoll::base
