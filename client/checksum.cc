// CRC-32C (Castagnoli, polynomial 0x1EDC6F41, reflected) of a model's parameters.
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "atoll/client/trainer.h"

namespace Atoll::client {
namespace {

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0x82F63B78u : 0u);
    table[byte] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = MakeTable();

uint32_t ExtendByTable(uint32_t crc, const uint8_t* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) crc = (crc >> 8) ^ kTable[(crc ^ bytes[i]) & 0xff];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t ExtendByHardware(uint32_t crc, const uint8_t* bytes,
                                                            size_t count) {
  uint64_t wide = crc;
  for (; count >= 8; bytes += 8, count -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; count > 0; ++bytes, --count) crc = _mm_crc32_u8(crc, *bytes);
  return crc;
}
#endif

uint32_t Extend(uint32_t crc, const void* data, size_t count) {
  const auto* bytes = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ExtendByHardware(crc, bytes, count);
#endif
  return ExtendByTable(crc, bytes, count);
}

}  // namespace

uint32_t Checksum(const NamedTensors& parameters) {
  uint32_t crc = 0xFFFFFFFFu;
  for (const auto& [name, tensor] : parameters.items()) {
    const at::Tensor values = tensor.detach().cpu().contiguous();
    crc = Extend(crc, values.const_data_ptr(), values.nbytes());
  }
  return ~crc;
}

}  // namespace Atoll::client
