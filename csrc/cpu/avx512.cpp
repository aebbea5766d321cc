// The AVX-512 variant (F, BW, VL, DQ). Built with its own flags: everything here has internal
// linkage except the table.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/variants.hpp"
#include "cpu/xxh3_variant.inc"

namespace stitch {
namespace {

constexpr size_t kVector = 64;

__m512i load(const uint8_t* data) { return _mm512_loadu_si512(data); }

void xor_tail(const uint8_t* base, const uint8_t* delta, uint8_t* out, size_t byte_count) {
  const __mmask64 live = (uint64_t{1} << byte_count) - 1;  // byte_count < 64
  const __m512i left = _mm512_maskz_loadu_epi8(live, base);
  const __m512i right = _mm512_maskz_loadu_epi8(live, delta);
  _mm512_mask_storeu_epi8(out, live, _mm512_xor_si512(left, right));
}

void xor_into(const uint8_t* base, const uint8_t* delta, uint8_t* out, size_t byte_count) {
  size_t i = 0;
  for (; i + kVector <= byte_count; i += kVector) {
    _mm512_storeu_si512(out + i, _mm512_xor_si512(load(base + i), load(delta + i)));
  }
  xor_tail(base + i, delta + i, out + i, byte_count - i);
}

void xor_in_place(uint8_t* base, const uint8_t* delta, size_t byte_count) {
  size_t i = 0;
  for (; i + kXorSkipBytes <= byte_count; i += kXorSkipBytes) {
    __m512i any = load(delta + i);
    for (size_t k = kVector; k < kXorSkipBytes; k += kVector) {
      any = _mm512_or_si512(any, load(delta + i + k));
    }
    if (_mm512_test_epi64_mask(any, any) != 0) {
      xor_into(base + i, delta + i, base + i, kXorSkipBytes);
    }
  }
  xor_into(base + i, delta + i, base + i, byte_count - i);
}

// Eight lanes as 64-bit values; narrow ones are widened, then copied into the high half.
template <size_t kLaneBytes>
__m512i load_lanes(const uint8_t* data);

template <>
__m512i load_lanes<8>(const uint8_t* data) {
  return load(data);
}

template <>
__m512i load_lanes<4>(const uint8_t* data) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
  return _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(lanes));
}

template <>
__m512i load_lanes<2>(const uint8_t* data) {
  const __m128i lanes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  return _mm512_shuffle_epi32(_mm512_cvtepu16_epi64(lanes), _MM_PERM_CCAA);
}

template <>
__m512i load_lanes<1>(const uint8_t* data) {
  int64_t lanes = 0;
  memcpy(&lanes, data, sizeof lanes);
  return _mm512_shuffle_epi32(_mm512_cvtepu8_epi64(_mm_cvtsi64_si128(lanes)), _MM_PERM_CCAA);
}

__m512i half_product(__m512i value, const uint64_t* keys, __m512i block) {
  constexpr int kXorOfThree = 0x96;
  const __m512i z = _mm512_ternarylogic_epi64(value, _mm512_loadu_si512(keys), block, kXorOfThree);
  return _mm512_mul_epu32(z, _mm512_srli_epi64(z, 32));
}

uint64_t half_product(uint64_t z) { return (z & 0xFFFFFFFF) * (z >> 32); }

// The intrinsics that reduce add as signed numbers, which may overflow; these sums must wrap.
uint64_t reduce_add64(__m512i value) {
  uint64_t parts[8];
  _mm512_storeu_si512(parts, value);
  uint64_t sum = 0;
  for (const uint64_t part : parts) {
    sum += part;
  }
  return sum;
}

uint64_t reduce_add32(__m512i value) {
  uint32_t parts[16];
  _mm512_storeu_si512(parts, value);
  uint64_t sum = 0;
  for (const uint32_t part : parts) {
    sum += part;
  }
  return sum;
}

// The hardware prefetcher stops at each page, just as long as a run of 8-byte lanes: asking half a
// page ahead gives 32 instead of 25 GB/s (AVX-512, Zen 5). Past the end of the data it asks for
// nothing; the address is computed as a number because no such object need exist.
void prefetch_ahead(const uint8_t* data) {
  constexpr uintptr_t kAhead = 2048;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) + kAhead;
  _mm_prefetch(reinterpret_cast<const char*>(address),  // NOLINT(performance-no-int-to-ptr)
               _MM_HINT_T0);
}

template <size_t kLaneBytes>
void additive(const uint8_t* data, size_t lane_count, const AdditiveRun* run, uint64_t* sums) {
  constexpr size_t kLanes = 8;
  const __m512i block0 = _mm512_set1_epi64(static_cast<int64_t>(run->block0));
  const __m512i block1 = _mm512_set1_epi64(static_cast<int64_t>(run->block1));
  __m512i products0 = _mm512_setzero_si512();
  __m512i products1 = _mm512_setzero_si512();
  __m512i values0 = _mm512_setzero_si512();
  __m512i values1 = _mm512_setzero_si512();
  size_t i = 0;
  for (; i + kLanes <= lane_count; i += kLanes) {
    if constexpr (kLaneBytes == 8) {
      prefetch_ahead(data + i * kLaneBytes);
    }
    const __m512i x = load_lanes<kLaneBytes>(data + i * kLaneBytes);
    products0 = _mm512_add_epi64(products0, half_product(x, run->keys0 + i, block0));
    products1 = _mm512_add_epi64(products1, half_product(x, run->keys1 + i, block1));
    values0 = _mm512_add_epi64(values0, x);
    if constexpr (kLaneBytes == 8) {
      values1 = _mm512_add_epi64(values1, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
    }
  }
  if constexpr (kLaneBytes != 8) {
    values1 = values0;  // equal halves: the rotation changes nothing
  }
  uint64_t s0 = reduce_add64(_mm512_add_epi64(products0, values0));
  uint64_t s1 = reduce_add64(_mm512_add_epi64(products1, values1));
  for (; i < lane_count; ++i) {
    uint64_t x = 0;
    memcpy(&x, data + i * kLaneBytes, kLaneBytes);
    if constexpr (kLaneBytes != 8) {
      x |= x << 32;
    }
    s0 += half_product(x ^ run->keys0[i] ^ run->block0) + x;
    s1 += half_product(x ^ run->keys1[i] ^ run->block1) + (x << 32 | x >> 32);
  }
  sums[0] += s0;
  sums[1] += s1;
}

uint32_t adler32(uint32_t adler, const uint8_t* data, size_t byte_count) {
  constexpr uint64_t kModulus = 65521;                          // largest prime below 2**16
  constexpr size_t kBytesPerReduce = 5552 / kVector * kVector;  // 32-bit lanes can't overflow
  uint64_t low = adler & 0xFFFF;
  uint64_t high = adler >> 16;
  const __m512i zero = _mm512_setzero_si512();
  alignas(64) int8_t weight_bytes[kVector];
  for (size_t i = 0; i < kVector; ++i) {
    weight_bytes[i] = static_cast<int8_t>(kVector - i);
  }
  const __m512i weights = _mm512_load_si512(weight_bytes);
  const __m512i ones = _mm512_set1_epi16(1);
  while (byte_count >= kVector) {
    const size_t whole = byte_count / kVector * kVector;
    const size_t count = whole < kBytesPerReduce ? whole : kBytesPerReduce;
    __m512i byte_sums = zero;
    __m512i earlier_sums = zero;
    __m512i weighted = zero;
    for (size_t i = 0; i < count; i += kVector) {
      const __m512i bytes = load(data + i);
      earlier_sums = _mm512_add_epi32(earlier_sums, byte_sums);
      byte_sums = _mm512_add_epi32(byte_sums, _mm512_sad_epu8(bytes, zero));
      weighted =
          _mm512_add_epi32(weighted, _mm512_madd_epi16(_mm512_maddubs_epi16(bytes, weights), ones));
    }
    high += low * count + kVector * reduce_add32(earlier_sums) + reduce_add32(weighted);
    low += reduce_add32(byte_sums);
    low %= kModulus;
    high %= kModulus;
    data += count;
    byte_count -= count;
  }
  for (size_t i = 0; i < byte_count; ++i) {
    low += data[i];
    high += low;
  }
  return static_cast<uint32_t>(high % kModulus << 16 | low % kModulus);
}

}  // namespace

const Kernels kAvx512Kernels = {
    "avx512", xor_into,   xor_in_place, {additive<1>, additive<2>, additive<4>, additive<8>},
    adler32,  xxh3_reset, xxh3_update,  xxh3_digest,
};

}  // namespace stitch
