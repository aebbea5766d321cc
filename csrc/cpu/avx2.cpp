// The AVX2 variant. Built with its own flags: everything here has internal linkage except the
// table.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/variants.hpp"
#include "cpu/xxh3_variant.inc"

namespace stitch {
namespace {

constexpr size_t kVector = 32;

__m256i load(const void* data) { return _mm256_loadu_si256(static_cast<const __m256i*>(data)); }

void store(void* data, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(data), value); }

void xor_tail(const uint8_t* base, const uint8_t* delta, uint8_t* out, size_t byte_count) {
  for (size_t i = 0; i < byte_count; ++i) {
    out[i] = static_cast<uint8_t>(base[i] ^ delta[i]);
  }
}

void xor_into(const uint8_t* base, const uint8_t* delta, uint8_t* out, size_t byte_count) {
  size_t i = 0;
  for (; i + kVector <= byte_count; i += kVector) {
    store(out + i, _mm256_xor_si256(load(base + i), load(delta + i)));
  }
  xor_tail(base + i, delta + i, out + i, byte_count - i);
}

void xor_in_place(uint8_t* base, const uint8_t* delta, size_t byte_count) {
  size_t i = 0;
  for (; i + kXorSkipBytes <= byte_count; i += kXorSkipBytes) {
    __m256i any = load(delta + i);
    for (size_t k = kVector; k < kXorSkipBytes; k += kVector) {
      any = _mm256_or_si256(any, load(delta + i + k));
    }
    if (_mm256_testz_si256(any, any) == 0) {
      xor_into(base + i, delta + i, base + i, kXorSkipBytes);
    }
  }
  xor_into(base + i, delta + i, base + i, byte_count - i);
}

// Four lanes as 64-bit values; narrow ones are widened, then copied into the high half.
template <size_t kLaneBytes>
__m256i load_lanes(const uint8_t* data);

template <>
__m256i load_lanes<8>(const uint8_t* data) {
  return load(data);
}

template <>
__m256i load_lanes<4>(const uint8_t* data) {
  const __m128i lanes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  return _mm256_shuffle_epi32(_mm256_cvtepu32_epi64(lanes), _MM_SHUFFLE(2, 2, 0, 0));
}

template <>
__m256i load_lanes<2>(const uint8_t* data) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
  return _mm256_shuffle_epi32(_mm256_cvtepu16_epi64(lanes), _MM_SHUFFLE(2, 2, 0, 0));
}

template <>
__m256i load_lanes<1>(const uint8_t* data) {
  int32_t lanes = 0;
  memcpy(&lanes, data, sizeof lanes);
  return _mm256_shuffle_epi32(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(lanes)),
                              _MM_SHUFFLE(2, 2, 0, 0));
}

__m256i half_product(__m256i value, const uint64_t* keys, __m256i block) {
  const __m256i z = _mm256_xor_si256(_mm256_xor_si256(value, load(keys)), block);
  return _mm256_mul_epu32(z, _mm256_srli_epi64(z, 32));
}

uint64_t half_product(uint64_t z) { return (z & 0xFFFFFFFF) * (z >> 32); }

uint64_t reduce_add64(__m256i value) {
  const __m128i pair =
      _mm_add_epi64(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(pair)) +
         static_cast<uint64_t>(_mm_extract_epi64(pair, 1));
}

uint64_t reduce_add32(__m256i value) {
  uint32_t parts[8];
  store(parts, value);
  uint64_t sum = 0;
  for (const uint32_t part : parts) {
    sum += part;
  }
  return sum;
}

template <size_t kLaneBytes>
void additive(const uint8_t* data, size_t lane_count, const AdditiveRun* run, uint64_t* sums) {
  constexpr size_t kLanes = 4;
  const __m256i block0 = _mm256_set1_epi64x(static_cast<int64_t>(run->block0));
  const __m256i block1 = _mm256_set1_epi64x(static_cast<int64_t>(run->block1));
  __m256i products0 = _mm256_setzero_si256();
  __m256i products1 = _mm256_setzero_si256();
  __m256i values0 = _mm256_setzero_si256();
  __m256i values1 = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + kLanes <= lane_count; i += kLanes) {
    const __m256i x = load_lanes<kLaneBytes>(data + i * kLaneBytes);
    products0 = _mm256_add_epi64(products0, half_product(x, run->keys0 + i, block0));
    products1 = _mm256_add_epi64(products1, half_product(x, run->keys1 + i, block1));
    values0 = _mm256_add_epi64(values0, x);
    if constexpr (kLaneBytes == 8) {
      values1 = _mm256_add_epi64(values1, _mm256_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1)));
    }
  }
  if constexpr (kLaneBytes != 8) {
    values1 = values0;  // equal halves: the rotation changes nothing
  }
  uint64_t s0 = reduce_add64(_mm256_add_epi64(products0, values0));
  uint64_t s1 = reduce_add64(_mm256_add_epi64(products1, values1));
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
  const __m256i zero = _mm256_setzero_si256();
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i weights =
      _mm256_setr_epi8(32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14,
                       13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1);
  while (byte_count >= kVector) {
    const size_t whole = byte_count / kVector * kVector;
    const size_t count = whole < kBytesPerReduce ? whole : kBytesPerReduce;
    __m256i byte_sums = zero;
    __m256i earlier_sums = zero;
    __m256i weighted = zero;
    for (size_t i = 0; i < count; i += kVector) {
      const __m256i bytes = load(data + i);
      earlier_sums = _mm256_add_epi32(earlier_sums, byte_sums);
      byte_sums = _mm256_add_epi32(byte_sums, _mm256_sad_epu8(bytes, zero));
      weighted =
          _mm256_add_epi32(weighted, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, weights), ones));
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

const Kernels kAvx2Kernels = {
    "avx2",  xor_into,   xor_in_place, {additive<1>, additive<2>, additive<4>, additive<8>},
    adler32, xxh3_reset, xxh3_update,  xxh3_digest,
};

}  // namespace stitch
