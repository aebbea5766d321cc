// The interop appliers: round trips in and out of place, and undo after every kind of failure.
#include <thread>

#include "check.hpp"
#include "core/delta.hpp"

namespace stitch::test {
namespace {

using Applier = Result<Verified> (*)(const Kernels&, std::span<const std::uint8_t>,
                                     std::span<const std::uint8_t>, std::span<std::uint8_t>,
                                     const VerifyPlan&);

Bytes frame_of(const Bytes& data) {
  FrameWriter writer;
  if (!writer.open(1, data.size()).ok() || !writer.write(data, true).ok()) {
    return {};
  }
  const auto span = writer.output().span();
  return {span.begin(), span.end()};
}

Bytes encoded(Result<std::optional<ByteBuffer>> result) {
  if (!result.ok() || !result.value().has_value()) {
    return {};
  }
  const auto span = result.value()->span();
  return {span.begin(), span.end()};
}

void round_trip(Checks& checks, const Kernels& kernels, Applier apply, const Bytes& blob,
                const Bytes& base, const Bytes& target) {
  const VerifyPlan plan{DigestKind::kXxh3, 1};
  Digester digester(kernels, DigestKind::kXxh3);
  digester.update(target);
  Bytes out(base.size());
  const auto applied = apply(kernels, blob, base, out, plan);
  checks.that(applied.ok() && out == target, "apply");
  checks.that(applied.ok() && applied.value().digest_hex == digester.hex(), "digest");
  checks.that(applied.ok() && applied.value().sums == additive_oracle(target, 1, 0), "sums");
  Bytes in_place = base;
  checks.that(apply(kernels, blob, in_place, in_place, plan).ok() && in_place == target,
              "apply in place");
  for (std::size_t size = 0; size < blob.size(); size += 1 + size / 2) {
    const Bytes cut(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(size));
    in_place = base;
    const auto refused = apply(kernels, cut, in_place, in_place, plan);
    checks.that(refused.status().code() == StatusCode::kCorruptData && in_place == base,
                "cut blob is undone");
  }
}

void test_overwrite_damage(Checks& checks, const Kernels& kernels) {
  const Bytes base(100, 9);
  const auto refuse = [&](const Bytes& payload, std::string_view words) {
    Bytes in_place = base;
    const auto refused = overwrite_apply(kernels, frame_of(payload), in_place, in_place, {});
    checks.corrupt(refused.status(), words);
    checks.that(in_place == base, "nothing written");
  };
  refuse({}, "4-byte count");
  refuse({101, 0, 0, 0}, "exceeds");
  refuse({1, 0, 0, 0, 100, 0, 0, 0, 1}, "past");
  refuse({1, 0, 0, 0, 3, 0, 0, 0}, "need");
  refuse({2, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 1, 2}, "twice");
  Bytes out(100);
  const Bytes backwards = {2, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0, 1, 2};
  checks.that(overwrite_apply(kernels, frame_of(backwards), base, out, {}).ok() && out[9] == 1 &&
                  out[3] == 2,
              "positions in any order");
}

}  // namespace

void test_delta(Checks& checks, const Kernels& kernels) {
  Random random(5);
  for (const std::size_t size : {1U, 7U, 64U, 1000U, 262'144U, 600'001U}) {
    const Bytes base = random.bytes(size);
    Bytes target = base;
    for (std::size_t i = 0; i < 1 + size / 50; ++i) {
      target[random.below(size)] ^= static_cast<std::uint8_t>(1 + random.below(255));
    }
    target[0] = static_cast<std::uint8_t>(base[0] ^ 1);
    round_trip(checks, kernels, xor_apply, encoded(xor_encode(kernels, base, target, 1)), base,
               target);
    round_trip(checks, kernels, overwrite_apply, encoded(overwrite_encode(base, target, 1)), base,
               target);
    checks.that(encoded(xor_encode(kernels, base, base, 1)).empty(), "equal tensors");
  }
  test_overwrite_damage(checks, kernels);
  Bytes arena(200);
  const std::span<std::uint8_t> view(arena);
  checks.that(xor_apply(kernels, {}, view.first(100), view.subspan(50, 100), {}).status().code() ==
                  StatusCode::kInvalidInput,
              "overlap is refused");
  // Appliers share nothing: several at once over one base.
  const Bytes base = random.bytes(400'000);
  const Bytes target = random.bytes(400'000);
  const Bytes blob = encoded(xor_encode(kernels, base, target, 1));
  std::vector<Bytes> outs(3, Bytes(base.size()));
  std::vector<std::thread> threads;
  for (Bytes& out : outs) {
    threads.emplace_back([&] {
      (void)xor_apply(kernels, blob, base, out, {DigestKind::kXxh3, 8});
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Bytes& out : outs) {
    checks.that(out == target, "concurrent apply");
  }
}

}  // namespace stitch::test
