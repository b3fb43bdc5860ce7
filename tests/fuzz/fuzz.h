// What the decoders' files share: decoders_fuzz.cc has the program and what every call meets, messages_fuzz.cc the
// messages of the services on top.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace Atoll::fuzz {

/// Takes an input apart, from the front; what is missing is zero.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}
  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const uint8_t byte = static_cast<uint8_t>(rest_[0]);
    rest_.remove_prefix(1);
    return byte;
  }
  absl::string_view Take(size_t size) {
    const absl::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  absl::string_view rest() const { return rest_; }

 private:
  absl::string_view rest_;
};

using Seeds = std::vector<std::string>;

inline std::string Prefixed(std::initializer_list<int> prefix, absl::string_view bytes) {
  std::string seed;
  for (int byte : prefix) seed.push_back(static_cast<char>(byte));
  return absl::StrCat(seed, bytes);
}

// Each: which message u8 | its body. What is decoded can be encoded, and is then decoded to the same.
void FuzzMembership(Input input);
Seeds MembershipSeeds();
void FuzzRref(Input input);
Seeds RrefSeeds();
void FuzzShard(Input input);
Seeds ShardSeeds();

}  // namespace Atoll::fuzz
