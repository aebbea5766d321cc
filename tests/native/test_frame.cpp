// One zstd frame from untrusted bytes: sizes that lie, truncation, trailing bytes.
#include "check.hpp"
#include "core/frame.hpp"

namespace stitch::test {
namespace {

Bytes compressed(const Bytes& data) {
  FrameWriter writer;
  if (!writer.open(1, data.size()).ok() || !writer.write(data, true).ok()) {
    return {};
  }
  const auto span = writer.output().span();
  return {span.begin(), span.end()};
}

}  // namespace

void test_frame(Checks& checks) {
  Random random(4);
  Bytes data = random.bytes(300'000);
  data.resize(900'000, 7);
  const Bytes blob = compressed(data);
  auto decoded = decode_frame(blob, data.size());
  checks.that(
      decoded.ok() && Bytes(decoded.value().span().begin(), decoded.value().span().end()) == data,
      "round trip");
  checks.corrupt(decode_frame(blob, data.size() - 1).status(), "claims");
  Bytes trailing = blob;
  trailing.push_back(0);
  checks.corrupt(decode_frame(trailing, data.size()).status(), "follow");
  for (std::size_t size = 0; size < blob.size(); size += 1 + size / 3) {
    const Bytes cut(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size));
    checks.that(decode_frame(cut, data.size()).status().code() == StatusCode::kCorruptData,
                "cut at " + std::to_string(size));
  }
  Bytes room(data.size() + 1);
  checks.corrupt(decode_frame_into(blob, room), "expected");
  // Claims 2**40 bytes in 15: refused before anything is allocated.
  const Bytes claim = {0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0};
  checks.corrupt(decode_frame(claim, std::uint64_t{1} << 50).status(), "can hold");
  checks.corrupt(decode_frame(claim, 100).status(), "claims");
  FrameWriter writer;
  checks.that(writer.open(0, 1).code() == StatusCode::kInvalidInput, "level 0");
  FrameReader reader;
  checks.that(reader.open(blob, data.size()).ok(), "a reader opens");
  checks.that(reader.open(blob, data.size()).ok(), "a reader opens again");
}

}  // namespace stitch::test
