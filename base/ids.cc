#include "atoll/base/ids.h"

#include <random>

namespace Atoll::base {

Incarnation NewIncarnation() {
  std::random_device source;  // getrandom or /dev/urandom: never a seeded sequence.
  uint64_t value = 0;
  while (value == 0) value = (static_cast<uint64_t>(source()) << 32) | source();
  return Incarnation(value);
}

}  // namespace Atoll::base
