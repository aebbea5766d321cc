#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <string>

#include "core/delta.hpp"
#include "core/verify_pass.hpp"

namespace stitch {
namespace {

constexpr std::uint64_t kHeadBytes = 4;                            // the count
constexpr std::uint64_t kChangeBytes = 5;                          // u4 position, u1 value
constexpr std::uint64_t kTensorBytesMax = std::uint64_t{1} << 32;  // positions are u4

// The validated payload: `count` positions (unaligned u4) and as many values.
struct Changes {
  const std::uint8_t* positions;
  const std::uint8_t* values;
  std::size_t count;
  bool rising;

  std::uint32_t position(std::size_t index) const {
    std::uint32_t value = 0;
    std::memcpy(&value, positions + index * sizeof value, sizeof value);
    return value;
  }
};

Status check_distinct(const Changes& changes) {
  ByteBuffer copy;
  if (Status status = copy.grow(changes.count * sizeof(std::uint32_t)); !status.ok()) {
    return status;
  }
  // new[] of bytes is aligned for any scalar type.
  auto* const sorted = new (copy.data()) std::uint32_t[changes.count];
  std::memcpy(sorted, changes.positions, changes.count * sizeof(std::uint32_t));
  std::sort(sorted, sorted + changes.count);
  const auto* const twin = std::adjacent_find(sorted, sorted + changes.count);
  if (twin != sorted + changes.count) {
    return Status::corrupt("overwrite payload: position " + std::to_string(*twin) +
                           " appears twice");
  }
  return {};
}

// Checks everything, so that applying can't fail.
Result<Changes> parse_changes(std::span<const std::uint8_t> payload, std::size_t tensor_bytes) {
  std::uint32_t count = 0;
  if (payload.size() < sizeof count) {
    return Status::corrupt("overwrite payload has " + std::to_string(payload.size()) +
                           " bytes, fewer than its 4-byte count");
  }
  std::memcpy(&count, payload.data(), sizeof count);
  if (count > tensor_bytes) {
    return Status::corrupt("overwrite payload: count " + std::to_string(count) +
                           " exceeds the tensor's " + std::to_string(tensor_bytes) + " bytes");
  }
  const std::uint64_t expected = kHeadBytes + kChangeBytes * count;
  if (payload.size() != expected) {
    return Status::corrupt("overwrite payload has " + std::to_string(payload.size()) + " bytes, " +
                           std::to_string(count) + " changes need " + std::to_string(expected));
  }
  const std::uint8_t* const positions = payload.data() + kHeadBytes;
  Changes changes{positions, positions + std::size_t{count} * 4, count, true};
  std::uint64_t next = 0;
  for (std::size_t index = 0; index < changes.count; ++index) {
    const std::uint32_t position = changes.position(index);
    if (position >= tensor_bytes) {
      return Status::corrupt("overwrite payload: position " + std::to_string(position) +
                             " is past the tensor's " + std::to_string(tensor_bytes) + " bytes");
    }
    changes.rising = changes.rising && position >= next;
    next = std::uint64_t{position} + 1;
  }
  if (!changes.rising) {
    if (Status status = check_distinct(changes); !status.ok()) {
      return status;
    }
  }
  return changes;
}

// Rising positions: copy, patch and verify piece by piece.
void apply_rising(const Changes& changes, std::span<const std::uint8_t> base,
                  std::span<std::uint8_t> out, VerifyPass& pass) {
  std::size_t index = 0;
  for (std::size_t begin = 0; begin < out.size(); begin += kPieceBytes) {
    const std::size_t end = std::min(begin + kPieceBytes, out.size());
    if (base.data() != out.data()) {
      std::memcpy(out.data() + begin, base.data() + begin, end - begin);
    }
    for (; index < changes.count; ++index) {
      const std::uint32_t position = changes.position(index);
      if (position >= end) {
        break;
      }
      out[position] = changes.values[index];
    }
    pass.feed(out.subspan(begin, end - begin));
  }
}

void apply_any_order(const Changes& changes, std::span<const std::uint8_t> base,
                     std::span<std::uint8_t> out, VerifyPass& pass) {
  if (base.data() != out.data() && !out.empty()) {
    std::memcpy(out.data(), base.data(), out.size());
  }
  for (std::size_t index = 0; index < changes.count; ++index) {
    out[changes.position(index)] = changes.values[index];
  }
  for (std::size_t begin = 0; begin < out.size(); begin += kPieceBytes) {
    pass.feed(out.subspan(begin, std::min(kPieceBytes, out.size() - begin)));
  }
}

constexpr std::size_t kWord = sizeof(std::uint64_t);

std::uint64_t load_word(const std::uint8_t* data, std::size_t byte_count) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, byte_count);
  return word;
}

std::size_t nonzero_bytes(std::uint64_t word) {
  word |= word >> 4;
  word |= word >> 2;
  word |= word >> 1;
  return static_cast<std::size_t>(std::popcount(word & 0x0101010101010101));
}

// Calls visit(begin, change) with the XOR of each 8 bytes that differ; the last may be shorter.
template <typename Visit>
void for_each_change(std::span<const std::uint8_t> base, std::span<const std::uint8_t> target,
                     Visit visit) {
  std::size_t begin = 0;
  for (; begin + kWord <= base.size(); begin += kWord) {
    const std::uint64_t change =
        load_word(base.data() + begin, kWord) ^ load_word(target.data() + begin, kWord);
    if (change != 0) {
      visit(begin, change);
    }
  }
  const std::size_t left = base.size() - begin;
  if (left > 0) {
    visit(begin, load_word(base.data() + begin, left) ^ load_word(target.data() + begin, left));
  }
}

std::size_t count_changes(std::span<const std::uint8_t> base,
                          std::span<const std::uint8_t> target) {
  std::size_t count = 0;
  for_each_change(base, target, [&count](std::size_t /*begin*/, std::uint64_t change) {
    count += nonzero_bytes(change);
  });
  return count;
}

// Writes the positions and values of the changes, `count` of them if nobody wrote to the inputs
// since they were counted. Returns whether there were exactly as many; never writes more.
bool collect_changes(std::span<const std::uint8_t> base, std::span<const std::uint8_t> target,
                     std::size_t count, std::uint8_t* positions) {
  std::uint8_t* values = positions + count * sizeof(std::uint32_t);
  std::size_t found = 0;
  for_each_change(base, target, [&](std::size_t begin, std::uint64_t change) {
    for (; change != 0; ++found) {
      const auto byte = static_cast<std::size_t>(std::countr_zero(change)) / 8;
      if (found < count) {
        const auto position = static_cast<std::uint32_t>(begin + byte);
        std::memcpy(positions + found * sizeof position, &position, sizeof position);
        values[found] = target[begin + byte];
      }
      change &= ~(std::uint64_t{0xFF} << (8 * byte));
    }
  });
  return found == count;
}

}  // namespace

Result<Verified> overwrite_apply(const Kernels& kernels, std::span<const std::uint8_t> blob,
                                 std::span<const std::uint8_t> base, std::span<std::uint8_t> out,
                                 const VerifyPlan& plan) {
  for (const Status& status : {check_target(blob, base, out), check_plan(plan, out.size())}) {
    if (!status.ok()) {
      return status;
    }
  }
  // No more than 2**32 positions exist, whatever the tensor's size.
  const std::uint64_t changes_max = std::min<std::uint64_t>(out.size(), kTensorBytesMax);
  const auto payload = decode_frame(blob, kHeadBytes + kChangeBytes * changes_max);
  if (!payload.ok()) {
    return payload.status();
  }
  const auto changes = parse_changes(payload.value().span(), out.size());
  if (!changes.ok()) {
    return changes.status();
  }
  VerifyPass pass(kernels, plan);
  if (changes.value().rising) {
    apply_rising(changes.value(), base, out, pass);
  } else {
    apply_any_order(changes.value(), base, out, pass);
  }
  return pass.result();
}

Result<std::optional<ByteBuffer>> overwrite_encode(std::span<const std::uint8_t> base,
                                                   std::span<const std::uint8_t> target,
                                                   int level) {
  if (base.size() != target.size()) {
    return Status::invalid_input("target has " + std::to_string(target.size()) +
                                 " bytes, base has " + std::to_string(base.size()) +
                                 "; a delta needs equal lengths");
  }
  if (base.size() > kTensorBytesMax) {
    return Status::invalid_input("overwrite cannot describe " + std::to_string(base.size()) +
                                 " bytes: its positions end at 2**32; use xor");
  }
  const std::size_t count = count_changes(base, target);
  if (count > UINT32_MAX) {
    return Status::invalid_input("overwrite cannot count 2**32 changes; use xor");
  }
  const std::uint64_t payload_bytes = kHeadBytes + kChangeBytes * count;
  FrameWriter writer;
  if (Status status = writer.open(level, payload_bytes); !status.ok()) {
    return status;
  }
  if (count == 0) {
    return std::optional<ByteBuffer>();
  }
  ByteBuffer payload;
  if (Status status = payload.grow(payload_bytes); !status.ok()) {
    return status;
  }
  const auto stored_count = static_cast<std::uint32_t>(count);
  std::memcpy(payload.data(), &stored_count, sizeof stored_count);
  if (!collect_changes(base, target, count, payload.data() + kHeadBytes)) {
    return Status::invalid_input("base or target was written to while it was encoded");
  }
  payload.set_size(payload_bytes);
  if (Status status = writer.write(payload.span(), true); !status.ok()) {
    return status;
  }
  return std::optional<ByteBuffer>(std::move(writer.output()));
}

}  // namespace stitch
