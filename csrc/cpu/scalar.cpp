// The portable variant and oracle of the others: plain loops, read first.
#include <cstring>

#include "core/additive.hpp"
#include "cpu/variants.hpp"
#include "cpu/xxh3_variant.inc"

namespace stitch {
namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);

void xor_into(const std::uint8_t* base, const std::uint8_t* delta, std::uint8_t* out,
              std::size_t byte_count) {
  std::size_t i = 0;
  for (; i + kWord <= byte_count; i += kWord) {
    std::uint64_t left = 0;
    std::uint64_t right = 0;
    std::memcpy(&left, base + i, kWord);
    std::memcpy(&right, delta + i, kWord);
    left ^= right;
    std::memcpy(out + i, &left, kWord);
  }
  for (; i < byte_count; ++i) {
    out[i] = static_cast<std::uint8_t>(base[i] ^ delta[i]);
  }
}

void xor_in_place(std::uint8_t* base, const std::uint8_t* delta, std::size_t byte_count) {
  std::size_t i = 0;
  for (; i + kXorSkipBytes <= byte_count; i += kXorSkipBytes) {
    std::uint64_t any = 0;
    for (std::size_t k = 0; k < kXorSkipBytes; k += kWord) {
      std::uint64_t word = 0;
      std::memcpy(&word, delta + i + k, kWord);
      any |= word;
    }
    if (any != 0) {
      xor_into(base + i, delta + i, base + i, kXorSkipBytes);
    }
  }
  xor_into(base + i, delta + i, base + i, byte_count - i);
}

std::uint32_t adler32(std::uint32_t adler, const std::uint8_t* data, std::size_t byte_count) {
  constexpr std::uint32_t kModulus = 65521;      // largest prime below 2**16
  constexpr std::size_t kBytesPerReduce = 5552;  // most bytes before 32-bit sums can overflow
  std::uint32_t low = adler & 0xFFFF;
  std::uint32_t high = adler >> 16;
  while (byte_count > 0) {
    const std::size_t count = byte_count < kBytesPerReduce ? byte_count : kBytesPerReduce;
    for (std::size_t i = 0; i < count; ++i) {
      low += data[i];
      high += low;
    }
    low %= kModulus;
    high %= kModulus;
    data += count;
    byte_count -= count;
  }
  return high << 16 | low;
}

}  // namespace

const Kernels kScalarKernels = {
    "scalar",
    xor_into,
    xor_in_place,
    {additive_run_scalar1, additive_run_scalar2, additive_run_scalar4, additive_run_scalar8},
    adler32,
    xxh3_reset,
    xxh3_update,
    xxh3_digest,
};

}  // namespace stitch
