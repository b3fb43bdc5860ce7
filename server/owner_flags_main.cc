// The flags of atoll-server. Apart from its main, because atoll-run knows them too: it passes them on. Not LibTorch.
#include <cstdint>
#include <string>

#include "absl/flags/flag.h"

ABSL_FLAG(uint64_t, staging_bytes, uint64_t{1} << 30,
          "of gradients that came in and wait to be applied, a model; beyond it pushes wait their turn");
ABSL_FLAG(uint64_t, spare_bytes, uint64_t{256} << 20,
          "of old values that workers still read, a model; beyond it a step waits for them");
