// The table of inner loops that an instruction-set variant exports. Core takes the table as an
// argument and never asks which variant it is. Plain data only: files built with wide-vector
// flags include this header, so an inline function here could leak into every machine's path.
// Thread-safety: tables are immutable.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace stitch {

// One run of additive-checksum lanes inside one block of 512. `keys0`/`keys1` point at the first
// lane's entry of the two key tables (at least `lane_count` entries follow); `block0`/`block1`
// are the block's own keys. Adds to sums[0] and sums[1], modulo 2**64.
struct AdditiveRun {
  const uint64_t* keys0;
  const uint64_t* keys1;
  uint64_t block0;
  uint64_t block1;
};
using AdditiveFn = void (*)(const uint8_t* data, size_t lane_count, const AdditiveRun* run,
                            uint64_t* sums);

// Room for the streaming state of XXH3; each variant asserts that its state fits.
enum : size_t { kXxh3StateBytes = 640, kXxh3StateAlign = 64 };

struct Kernels {
  const char* name;
  // out[i] = base[i] ^ delta[i]; out is base itself or disjoint from both.
  void (*xor_into)(const uint8_t* base, const uint8_t* delta, uint8_t* out, size_t byte_count);
  // base[i] ^= delta[i], leaving longer runs of zero delta unwritten.
  void (*xor_in_place)(uint8_t* base, const uint8_t* delta, size_t byte_count);
  AdditiveFn additive[4];  // lanes of 1, 2, 4 and 8 bytes
  // Adler-32 of `byte_count` more bytes, from a previous value (1 at the start).
  uint32_t (*adler32)(uint32_t adler, const uint8_t* data, size_t byte_count);
  void (*xxh3_reset)(void* state);
  void (*xxh3_update)(void* state, const uint8_t* data, size_t byte_count);
  void (*xxh3_digest)(const void* state, uint64_t* low, uint64_t* high);
};

}  // namespace stitch
