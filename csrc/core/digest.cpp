#include "core/digest.hpp"

namespace stitch {
namespace {

void append_hex(std::string& text, std::uint64_t value, int digits) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) {
    text.push_back(kDigits[(value >> shift) & 0xF]);
  }
}

}  // namespace

Result<DigestKind> parse_digest_kind(std::string_view text) {
  if (text == "xxh3-128") {
    return DigestKind::kXxh3;
  }
  if (text == "adler32") {
    return DigestKind::kAdler32;
  }
  if (text == "none") {
    return DigestKind::kNone;
  }
  return Status::invalid_input("unknown digest kind '" + std::string(text.substr(0, 40)) +
                               "'; one of xxh3-128, adler32, none");
}

Digester::Digester(const Kernels& kernels, DigestKind kind) : kernels_(&kernels), kind_(kind) {
  if (kind_ == DigestKind::kXxh3) {
    kernels_->xxh3_reset(xxh3_.data());
  }
}

void Digester::update(std::span<const std::uint8_t> data) {
  if (data.empty()) {
    return;
  }
  if (kind_ == DigestKind::kXxh3) {
    kernels_->xxh3_update(xxh3_.data(), data.data(), data.size());
  } else if (kind_ == DigestKind::kAdler32) {
    adler_ = kernels_->adler32(adler_, data.data(), data.size());
  }
}

std::string Digester::hex() const {
  std::string text;
  if (kind_ == DigestKind::kXxh3) {
    std::uint64_t low = 0;
    std::uint64_t high = 0;
    kernels_->xxh3_digest(xxh3_.data(), &low, &high);
    append_hex(text, high, 16);
    append_hex(text, low, 16);
  } else if (kind_ == DigestKind::kAdler32) {
    append_hex(text, adler_, 8);
  }
  return text;
}

}  // namespace stitch
