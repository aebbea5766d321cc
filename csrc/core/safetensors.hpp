// The safetensors header, read from untrusted bytes and checked in full: what passes here tiles
// the file exactly (https://github.com/huggingface/safetensors, "Format").
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.hpp"

namespace stitch {

inline constexpr std::uint64_t kHeaderLengthBytes = 8;
inline constexpr std::uint64_t kHeaderBytesMax = std::uint64_t{100} << 20;  // as every known reader
inline constexpr std::size_t kRankMax = 64;  // as numpy; keeps a header's memory near its size

struct TensorEntry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0;  // relative to the data region
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;                           // in data order
  std::vector<std::pair<std::string, std::string>> metadata;  // in file order
  std::uint64_t data_offset = 0;
};

// Bits of one element of a safetensors dtype; nullopt for an unknown name.
std::optional<unsigned> dtype_bits(std::string_view dtype);

// A name or value as it may stand in an error message: bounded and printable.
std::string quote_name(std::string_view text);

// 8 + header length, checked against the file and the limit. Needs the file's first 8 bytes.
Result<std::uint64_t> safetensors_header_size(std::span<const std::uint8_t> head,
                                              std::uint64_t file_size);

// `head` holds at least the whole header; anything beyond it is ignored.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::uint8_t> head,
                                                   std::uint64_t file_size);

}  // namespace stitch
