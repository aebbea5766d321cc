#include "core/frame.hpp"

#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace stitch {
namespace {

constexpr std::uint32_t kFrameMagic = 0xFD2FB528;  // RFC 8878, 3.1.1
// 128 MiB: zstd's own limit for readers; levels up to 22 write no larger window. The window is
// touched only as far as output was produced, so a claim alone costs address space, not memory.
constexpr int kWindowLogMax = 27;
constexpr std::size_t kBlockBytesMax = std::size_t{128} << 10;  // RFC 8878, 3.1.1.2.4

Status corrupt_frame(const char* what) {
  return Status::corrupt(std::string("zstd frame: ") + what);
}

// A host without memory says nothing of the bytes: it must not condemn a publication.
bool is_out_of_memory(std::size_t code) {
  return ZSTD_getErrorCode(code) == ZSTD_error_memory_allocation;
}

Status decoder_status(std::size_t code) {
  return is_out_of_memory(code) ? Status::out_of_memory("no memory for a zstd decoder's window")
                                : corrupt_frame(ZSTD_getErrorName(code));
}

Status encoder_status(std::size_t code) {
  return is_out_of_memory(code) ? Status::out_of_memory("no memory for a zstd encoder")
                                : Status::internal(std::string("zstd: ") + ZSTD_getErrorName(code));
}

// A block is at least 4 bytes and gives at most 128 KiB: a frame can't hold more than this.
std::uint64_t expansion_max(std::size_t blob_size) {
  return (std::uint64_t{blob_size} / 4 + 1) * kBlockBytesMax;
}

}  // namespace

Status ByteBuffer::grow(std::size_t capacity) {
  if (capacity <= capacity_) {
    return {};
  }
  std::unique_ptr<std::uint8_t[]> larger(new (std::nothrow) std::uint8_t[capacity]);
  if (larger == nullptr) {
    return Status::out_of_memory("no memory for " + std::to_string(capacity) + " bytes");
  }
  if (size_ > 0) {
    std::memcpy(larger.get(), data_.get(), size_);
  }
  data_ = std::move(larger);
  capacity_ = capacity;
  return {};
}

Result<std::optional<std::uint64_t>> frame_content_size(std::span<const std::uint8_t> blob,
                                                        std::uint64_t size_max) {
  std::uint32_t magic = 0;
  if (blob.size() < sizeof magic) {
    return corrupt_frame("shorter than its magic number");
  }
  std::memcpy(&magic, blob.data(), sizeof magic);
  if (magic != kFrameMagic) {
    return corrupt_frame("does not start with the zstd magic number");
  }
  if (ZSTD_getDictID_fromFrame(blob.data(), blob.size()) != 0) {
    return corrupt_frame("needs a dictionary; dictionaries are not allowed");
  }
  const unsigned long long claimed = ZSTD_getFrameContentSize(blob.data(), blob.size());
  if (claimed == ZSTD_CONTENTSIZE_ERROR) {
    return corrupt_frame("damaged or truncated frame header");
  }
  if (claimed == ZSTD_CONTENTSIZE_UNKNOWN) {
    return std::optional<std::uint64_t>();
  }
  if (claimed > size_max) {
    return Status::corrupt("zstd frame: claims " + std::to_string(claimed) + " bytes, at most " +
                           std::to_string(size_max) + " are allowed here");
  }
  if (claimed > expansion_max(blob.size())) {
    return Status::corrupt("zstd frame: claims " + std::to_string(claimed) + " bytes, more than " +
                           std::to_string(blob.size()) + " compressed bytes can hold");
  }
  return std::optional<std::uint64_t>(claimed);
}

void FrameReader::Deleter::operator()(ZSTD_DCtx_s* context) const noexcept {
  ZSTD_freeDCtx(context);
}

Status FrameReader::open(std::span<const std::uint8_t> blob, std::uint64_t size_max) {
  const auto claimed = frame_content_size(blob, size_max);
  if (!claimed.ok()) {
    return claimed.status();
  }
  if (context_ == nullptr) {
    context_.reset(ZSTD_createDCtx());
    if (context_ == nullptr) {
      return Status::out_of_memory("no memory for a zstd decoder");
    }
  }
  const std::size_t reset = ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_and_parameters);
  const std::size_t window =
      ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, kWindowLogMax);
  if (ZSTD_isError(reset) != 0 || ZSTD_isError(window) != 0) {
    return Status::internal("zstd refused decoder parameters");
  }
  blob_ = blob;
  position_ = 0;
  ended_ = false;
  return {};
}

Result<std::size_t> FrameReader::read(std::span<std::uint8_t> out) {
  ZSTD_outBuffer target{out.data(), out.size(), 0};
  ZSTD_inBuffer source{blob_.data(), blob_.size(), position_};
  while (target.pos < target.size && !ended_) {
    const std::size_t in_before = source.pos;
    const std::size_t out_before = target.pos;
    const std::size_t hint = ZSTD_decompressStream(context_.get(), &target, &source);
    position_ = source.pos;
    if (ZSTD_isError(hint) != 0) {
      return decoder_status(hint);
    }
    ended_ = hint == 0;
    if (!ended_ && source.pos == in_before && target.pos == out_before) {
      return corrupt_frame("cut short");
    }
  }
  return target.pos;
}

Status FrameReader::finish() {
  std::uint8_t extra = 0;
  const auto more = read({&extra, 1});
  if (!more.ok()) {
    return more.status();
  }
  if (more.value() != 0) {
    return corrupt_frame("decodes to more bytes than expected");
  }
  if (position_ != blob_.size()) {
    return Status::corrupt("zstd frame: " + std::to_string(blob_.size() - position_) +
                           " bytes follow the frame; nothing may");
  }
  return {};
}

Status decode_frame_into(std::span<const std::uint8_t> blob, std::span<std::uint8_t> out) {
  FrameReader reader;
  if (Status status = reader.open(blob, out.size()); !status.ok()) {
    return status;
  }
  const auto count = reader.read(out);
  if (!count.ok()) {
    return count.status();
  }
  if (count.value() != out.size()) {
    return Status::corrupt("zstd frame: decodes to " + std::to_string(count.value()) +
                           " bytes, expected " + std::to_string(out.size()));
  }
  return reader.finish();
}

Result<ByteBuffer> decode_frame(std::span<const std::uint8_t> blob, std::uint64_t size_max) {
  const auto claimed = frame_content_size(blob, size_max);
  if (!claimed.ok()) {
    return claimed.status();
  }
  ByteBuffer buffer;
  if (claimed.value().has_value()) {
    const auto size = static_cast<std::size_t>(*claimed.value());
    if (Status status = buffer.grow(std::max<std::size_t>(size, 1)); !status.ok()) {
      return status;
    }
    buffer.set_size(size);
    if (Status status = decode_frame_into(blob, {buffer.data(), size}); !status.ok()) {
      return status;
    }
    return buffer;
  }
  FrameReader reader;
  if (Status status = reader.open(blob, size_max); !status.ok()) {
    return status;
  }
  std::size_t capacity =
      std::min<std::uint64_t>(std::max<std::uint64_t>(size_max, 1), 2 * kBlockBytesMax);
  while (true) {
    if (Status status = buffer.grow(capacity); !status.ok()) {
      return status;
    }
    const std::size_t room =
        static_cast<std::size_t>(std::min<std::uint64_t>(capacity, size_max) - buffer.size());
    const auto count = reader.read({buffer.data() + buffer.size(), room});
    if (!count.ok()) {
      return count.status();
    }
    buffer.set_size(buffer.size() + count.value());
    if (count.value() < room || buffer.size() == size_max) {
      break;
    }
    capacity =
        static_cast<std::size_t>(std::min<std::uint64_t>(size_max, std::uint64_t{capacity} * 2));
  }
  if (Status status = reader.finish(); !status.ok()) {
    return status;
  }
  return buffer;
}

void FrameWriter::Deleter::operator()(ZSTD_CCtx_s* context) const noexcept {
  ZSTD_freeCCtx(context);
}

Status FrameWriter::open(int level, std::uint64_t content_size) {
  if (level < 1 || level > 19) {
    return Status::invalid_input("zstd level " + std::to_string(level) +
                                 " is out of range; use 1 to 19");
  }
  context_.reset(ZSTD_createCCtx());
  if (context_ == nullptr) {
    return Status::out_of_memory("no memory for a zstd encoder");
  }
  for (const std::size_t code :
       {ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, level),
        ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_contentSizeFlag, 1),
        ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 0),
        ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_dictIDFlag, 0),
        ZSTD_CCtx_setPledgedSrcSize(context_.get(), content_size)}) {
    if (ZSTD_isError(code) != 0) {
      return encoder_status(code);
    }
  }
  output_ = ByteBuffer();
  return {};
}

Status FrameWriter::write(std::span<const std::uint8_t> data, bool last) {
  ZSTD_inBuffer source{data.data(), data.size(), 0};
  while (true) {
    const std::size_t room = output_.capacity() - output_.size();
    if (room < kBlockBytesMax) {
      const std::size_t wanted = std::max(output_.capacity() * 2, 2 * kBlockBytesMax);
      if (Status status = output_.grow(wanted); !status.ok()) {
        return status;
      }
    }
    ZSTD_outBuffer target{output_.data(), output_.capacity(), output_.size()};
    const std::size_t left =
        ZSTD_compressStream2(context_.get(), &target, &source, last ? ZSTD_e_end : ZSTD_e_continue);
    output_.set_size(target.pos);
    if (ZSTD_isError(left) != 0) {
      return encoder_status(left);
    }
    if (last ? left == 0 : source.pos == source.size) {
      return {};
    }
  }
}

}  // namespace stitch
