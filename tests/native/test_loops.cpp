// XOR, Adler-32 and XXH3 of one variant against plain loops and the scalar table.
#include "check.hpp"
#include "core/digest.hpp"
#include "cpu/dispatch.hpp"

namespace stitch::test {
namespace {

std::string digest_of(const Kernels& kernels, DigestKind kind, const Bytes& data,
                      std::size_t piece) {
  Digester digester(kernels, kind);
  for (std::size_t begin = 0; begin < data.size(); begin += piece) {
    digester.update(std::span(data).subspan(begin, std::min(piece, data.size() - begin)));
  }
  return digester.hex();
}

void test_xor(Checks& checks, const Kernels& kernels, std::size_t size, Random& random) {
  const Bytes base = random.bytes(size);
  Bytes delta(size, 0);
  for (std::size_t i = 0; i < size; i += 1 + random.below(900)) {
    delta[i] = static_cast<std::uint8_t>(random.next());
  }
  Bytes expected(size);
  for (std::size_t i = 0; i < size; ++i) {
    expected[i] = static_cast<std::uint8_t>(base[i] ^ delta[i]);
  }
  Bytes out(size);
  kernels.xor_into(base.data(), delta.data(), out.data(), size);
  checks.that(out == expected, "xor_into " + std::to_string(size));
  Bytes in_place = base;
  kernels.xor_in_place(in_place.data(), delta.data(), size);
  checks.that(in_place == expected, "xor_in_place " + std::to_string(size));
}

}  // namespace

void test_loops(Checks& checks, const Kernels& kernels) {
  const Kernels& scalar = *runnable_kernels().back();
  Random random(3);
  for (std::size_t size = 0; size < 4200; size += size < 300 ? 1 : 67) {
    test_xor(checks, kernels, size, random);
    const Bytes data = random.below(4) == 0 ? Bytes(size, 0xFF) : random.bytes(size);
    for (const DigestKind kind : {DigestKind::kXxh3, DigestKind::kAdler32}) {
      const std::string expected = digest_of(scalar, kind, data, size + 1);
      checks.that(digest_of(kernels, kind, data, size + 1) == expected, "digest at once");
      checks.that(digest_of(kernels, kind, data, 1 + random.below(300)) == expected,
                  "digest in pieces");
    }
  }
  const Bytes abc = {'a', 'b', 'c'};
  checks.that(digest_of(kernels, DigestKind::kXxh3, abc, 3) == "06b05ab6733a618578af5f94892f3950",
              "xxh3 of abc");
  checks.that(digest_of(kernels, DigestKind::kAdler32, abc, 3) == "024d0127", "adler32 of abc");
}

}  // namespace stitch::test
