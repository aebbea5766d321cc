// One zstd frame, decoded from untrusted bytes with bounded memory, and encoded.
// Rules: the blob is exactly one frame, no skippable frame, no dictionary, nothing after it.
// Thread-safety: objects belong to one thread at a time; functions are pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "core/status.hpp"

struct ZSTD_DCtx_s;
struct ZSTD_CCtx_s;

namespace stitch {

// A byte buffer that is not zeroed first and reports refusal instead of throwing.
class ByteBuffer {
 public:
  Status grow(std::size_t capacity);  // keeps content
  std::uint8_t* data() noexcept { return data_.get(); }
  const std::uint8_t* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }
  std::size_t capacity() const noexcept { return capacity_; }
  void set_size(std::size_t size) noexcept { size_ = size; }
  std::span<const std::uint8_t> span() const noexcept { return {data_.get(), size_}; }

 private:
  std::unique_ptr<std::uint8_t[]> data_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

// The content size a frame header claims, checked: nullopt if it claims none. CorruptData for
// anything but a plain frame header, a dictionary id, or a claim above `size_max`.
Result<std::optional<std::uint64_t>> frame_content_size(std::span<const std::uint8_t> blob,
                                                        std::uint64_t size_max);

// Streams one frame. The decoder keeps at most one window, of no more than 128 MiB and no
// more than was decoded.
class FrameReader {
 public:
  // `size_max`: the most bytes the frame may decode to; a larger claim fails in open().
  Status open(std::span<const std::uint8_t> blob, std::uint64_t size_max);
  // Fills `out` as far as the frame goes and returns the count; less than out.size() only at the
  // frame's end. CorruptData if the frame is damaged or cut short.
  Result<std::size_t> read(std::span<std::uint8_t> out);
  // CorruptData unless the frame ended exactly here and nothing follows it.
  Status finish();

 private:
  struct Deleter {
    void operator()(ZSTD_DCtx_s* context) const noexcept;
  };
  std::unique_ptr<ZSTD_DCtx_s, Deleter> context_;
  std::span<const std::uint8_t> blob_;
  std::size_t position_ = 0;
  bool ended_ = false;
};

// Decodes a whole frame of at most `size_max` bytes. Memory follows what was really decoded.
Result<ByteBuffer> decode_frame(std::span<const std::uint8_t> blob, std::uint64_t size_max);

// Decodes a frame of exactly out.size() bytes into `out`.
Status decode_frame_into(std::span<const std::uint8_t> blob, std::span<std::uint8_t> out);

// Streams bytes into one frame: content size in the header, no checksum, no dictionary.
class FrameWriter {
 public:
  Status open(int level, std::uint64_t content_size);
  // `last` ends the frame; the total must equal content_size.
  Status write(std::span<const std::uint8_t> data, bool last);
  ByteBuffer& output() noexcept { return output_; }

 private:
  struct Deleter {
    void operator()(ZSTD_CCtx_s* context) const noexcept;
  };
  std::unique_ptr<ZSTD_CCtx_s, Deleter> context_;
  ByteBuffer output_;
};

}  // namespace stitch
