#include "core/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "core/safetensors_sax.hpp"

namespace stitch {
namespace {

static_assert(std::endian::native == std::endian::little, "header length is little-endian");

struct DtypeBits {
  std::string_view name;
  unsigned bits;
};

constexpr std::array<DtypeBits, 22> kDtypes = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

Status corrupt_tensor(const TensorEntry& entry, const std::string& reason) {
  return Status::corrupt("safetensors tensor " + quote_name(entry.name) + ": " + reason);
}

std::string span_text(const TensorEntry& entry) {
  return "[" + std::to_string(entry.begin) + ", " + std::to_string(entry.end) + ")";
}

// Size in bytes of the tensor its dtype and shape describe.
Result<std::uint64_t> tensor_bytes(const TensorEntry& entry) {
  const std::optional<unsigned> bits = dtype_bits(entry.dtype);
  if (!bits.has_value()) {
    return corrupt_tensor(entry, "unknown dtype " + quote_name(entry.dtype));
  }
  std::uint64_t total_bits = *bits;
  for (const std::uint64_t dim : entry.shape) {
    if (dim != 0 && total_bits > std::numeric_limits<std::uint64_t>::max() / dim) {
      return corrupt_tensor(entry, "shape overflows 64 bits");
    }
    total_bits *= dim;
  }
  if (total_bits % 8 != 0) {
    return corrupt_tensor(entry, "shape ends inside a byte for dtype " + entry.dtype);
  }
  return total_bits / 8;
}

Status check_entry(const TensorEntry& entry, std::uint64_t data_size) {
  const auto bytes = tensor_bytes(entry);
  if (!bytes.ok()) {
    return bytes.status();
  }
  if (entry.begin > entry.end) {
    return corrupt_tensor(entry, "span " + span_text(entry) + " begins after its end");
  }
  if (entry.end > data_size) {
    return corrupt_tensor(entry, "span " + span_text(entry) + " ends past the file's " +
                                     std::to_string(data_size) + " data bytes");
  }
  if (entry.end - entry.begin != bytes.value()) {
    return corrupt_tensor(entry, "span " + span_text(entry) +
                                     " does not fit dtype and shape, which need " +
                                     std::to_string(bytes.value()) + " bytes");
  }
  return {};
}

// Entries in data order must follow one another without overlap or gap, from 0 to the end.
Status check_tiling(const std::vector<TensorEntry>& entries, std::uint64_t data_size) {
  std::uint64_t next = 0;
  for (const TensorEntry& entry : entries) {
    if (entry.begin < next) {
      return corrupt_tensor(entry, "span " + span_text(entry) +
                                       " overlaps the one before, which ends at " +
                                       std::to_string(next));
    }
    if (entry.begin > next) {
      return corrupt_tensor(entry, "gap of " + std::to_string(entry.begin - next) +
                                       " bytes before its span " + span_text(entry));
    }
    next = entry.end;
  }
  if (next != data_size) {
    return Status::corrupt("safetensors file: " + std::to_string(data_size - next) +
                           " trailing bytes after the last tensor");
  }
  return {};
}

}  // namespace

std::optional<unsigned> dtype_bits(std::string_view dtype) {
  for (const DtypeBits& known : kDtypes) {
    if (known.name == dtype) {
      return known.bits;
    }
  }
  return std::nullopt;
}

std::string quote_name(std::string_view text) {
  constexpr std::size_t kShownMax = 120;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string shown = "'";
  std::size_t length = std::min(text.size(), kShownMax);
  // Never cut a UTF-8 sequence in two.
  while (length < text.size() && length > 0 &&
         (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) {
    --length;
  }
  for (const char letter : text.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte < 0x20 || byte == 0x7F) {
      shown += "\\x";
      shown += kHex[byte >> 4];
      shown += kHex[byte & 0xF];
    } else {
      shown += letter;
    }
  }
  return shown + (length < text.size() ? "…'" : "'");
}

Result<std::uint64_t> safetensors_header_size(std::span<const std::uint8_t> head,
                                              std::uint64_t file_size) {
  if (file_size < kHeaderLengthBytes) {
    return Status::corrupt("safetensors header length: the file has only " +
                           std::to_string(file_size) + " bytes");
  }
  if (head.size() < kHeaderLengthBytes) {
    return Status::invalid_input("the file's first 8 bytes are needed, got " +
                                 std::to_string(head.size()));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, head.data(), sizeof length);
  if (length > kHeaderBytesMax) {
    return Status::corrupt("safetensors header length " + std::to_string(length) +
                           " exceeds the limit of 100 MiB");
  }
  if (length > file_size - kHeaderLengthBytes) {
    return Status::corrupt("safetensors header length " + std::to_string(length) +
                           " exceeds the file's " + std::to_string(file_size) + " bytes");
  }
  return kHeaderLengthBytes + length;
}

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::uint8_t> head,
                                                   std::uint64_t file_size) {
  const auto size = safetensors_header_size(head, file_size);
  if (!size.ok()) {
    return size.status();
  }
  if (head.size() < size.value()) {
    return Status::invalid_input("the header has " + std::to_string(size.value()) +
                                 " bytes, only " + std::to_string(head.size()) + " were given");
  }
  SafetensorsHeader header;
  header.data_offset = size.value();
  const auto json = head.subspan(kHeaderLengthBytes, size.value() - kHeaderLengthBytes);
  if (json.empty() || json.front() != '{') {
    return Status::corrupt("safetensors header must start with '{'");
  }
  // Char access to bytes is always allowed.
  const std::string_view text(reinterpret_cast<const char*>(json.data()), json.size());
  if (Status status = parse_header_json(text, header); !status.ok()) {
    return status;
  }
  const std::uint64_t data_size = file_size - header.data_offset;
  for (const TensorEntry& entry : header.entries) {
    if (Status status = check_entry(entry, data_size); !status.ok()) {
      return status;
    }
  }
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const TensorEntry& a, const TensorEntry& b) {
                     return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
                   });
  if (Status status = check_tiling(header.entries, data_size); !status.ok()) {
    return status;
  }
  return header;
}

}  // namespace stitch
