#include <algorithm>
#include <cstring>
#include <string>

#include "core/delta.hpp"
#include "core/verify_pass.hpp"

namespace stitch {
namespace {

// XORs the first `byte_count` decoded bytes of `blob` over `data` once more, which undoes them.
// The same blob decoded that far before, so it does so again.
Status undo_prefix(const Kernels& kernels, FrameReader& reader, ByteBuffer& scratch,
                   std::span<const std::uint8_t> blob, std::span<std::uint8_t> data,
                   std::size_t byte_count) {
  if (Status status = reader.open(blob, data.size()); !status.ok()) {
    return status;
  }
  for (std::size_t begin = 0; begin < byte_count;) {
    const std::size_t wanted = std::min(kPieceBytes, byte_count - begin);
    const auto count = reader.read({scratch.data(), wanted});
    if (!count.ok()) {
      return count.status();
    }
    if (count.value() != wanted) {
      return Status::internal("xor undo: the blob changed while it was applied");
    }
    kernels.xor_in_place(data.data() + begin, scratch.data(), wanted);
    begin += wanted;
  }
  return {};
}

// Applies the whole frame; `applied` counts the bytes of `out` that hold target bytes.
Status apply_pieces(const Kernels& kernels, FrameReader& reader, ByteBuffer& scratch,
                    std::span<const std::uint8_t> base, std::span<std::uint8_t> out,
                    VerifyPass& pass, std::size_t& applied) {
  while (applied < out.size()) {
    const std::size_t wanted = std::min(kPieceBytes, out.size() - applied);
    const auto count = reader.read({scratch.data(), wanted});
    if (!count.ok()) {
      return count.status();
    }
    if (count.value() != wanted) {
      return Status::corrupt("xor payload decodes to " + std::to_string(applied + count.value()) +
                             " bytes, the tensor has " + std::to_string(out.size()));
    }
    std::uint8_t* const piece = out.data() + applied;
    if (base.data() == out.data()) {
      kernels.xor_in_place(piece, scratch.data(), wanted);
    } else {
      kernels.xor_into(base.data() + applied, scratch.data(), piece, wanted);
    }
    applied += wanted;
    pass.feed({piece, wanted});
  }
  return reader.finish();
}

}  // namespace

Result<Verified> xor_apply(const Kernels& kernels, std::span<const std::uint8_t> blob,
                           std::span<const std::uint8_t> base, std::span<std::uint8_t> out,
                           const VerifyPlan& plan) {
  for (const Status& status : {check_target(blob, base, out), check_plan(plan, out.size())}) {
    if (!status.ok()) {
      return status;
    }
  }
  FrameReader reader;
  if (Status status = reader.open(blob, out.size()); !status.ok()) {
    return status;
  }
  ByteBuffer scratch;
  if (Status status = scratch.grow(std::clamp<std::size_t>(out.size(), 1, kPieceBytes));
      !status.ok()) {
    return status;
  }
  VerifyPass pass(kernels, plan);
  std::size_t applied = 0;
  Status status = apply_pieces(kernels, reader, scratch, base, out, pass, applied);
  if (status.ok()) {
    return pass.result();
  }
  if (base.data() == out.data()) {
    if (Status undone = undo_prefix(kernels, reader, scratch, blob, out, applied); !undone.ok()) {
      return Status::internal("could not undo a failed xor apply: " + undone.message());
    }
  }
  return status;
}

Result<std::optional<ByteBuffer>> xor_encode(const Kernels& kernels,
                                             std::span<const std::uint8_t> base,
                                             std::span<const std::uint8_t> target, int level) {
  if (base.size() != target.size()) {
    return Status::invalid_input("target has " + std::to_string(target.size()) +
                                 " bytes, base has " + std::to_string(base.size()) +
                                 "; a delta needs equal lengths");
  }
  FrameWriter writer;
  if (Status status = writer.open(level, base.size()); !status.ok()) {
    return status;
  }
  if (base.empty() || std::memcmp(base.data(), target.data(), base.size()) == 0) {
    return std::optional<ByteBuffer>();
  }
  ByteBuffer scratch;
  if (Status status = scratch.grow(std::min(kPieceBytes, base.size())); !status.ok()) {
    return status;
  }
  for (std::size_t begin = 0; begin < base.size(); begin += kPieceBytes) {
    const std::size_t count = std::min(kPieceBytes, base.size() - begin);
    kernels.xor_into(base.data() + begin, target.data() + begin, scratch.data(), count);
    const bool last = begin + count == base.size();
    if (Status status = writer.write({scratch.data(), count}, last); !status.ok()) {
      return status;
    }
  }
  return std::optional<ByteBuffer>(std::move(writer.output()));
}

}  // namespace stitch
