#include "core/verify_pass.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

namespace stitch {
namespace {

bool overlap(std::span<const std::uint8_t> left, std::span<const std::uint8_t> right) {
  const std::less<const std::uint8_t*> before;  // a total order, also over unrelated objects
  return before(left.data(), right.data() + right.size()) &&
         before(right.data(), left.data() + left.size());
}

}  // namespace

VerifyPass::VerifyPass(const Kernels& kernels, const VerifyPlan& plan)
    : kernels_(&kernels), lane_bytes_(plan.lane_bytes), digester_(kernels, plan.digest) {}

void VerifyPass::feed(std::span<const std::uint8_t> piece) {
  digester_.update(piece);
  if (lane_bytes_ != 0) {
    const Sums part = additive_sums(*kernels_, piece, lane_bytes_, lane_);
    sums_.s0 += part.s0;
    sums_.s1 += part.s1;
    lane_ += piece.size() / lane_bytes_;
  }
}

Verified VerifyPass::result() const { return {digester_.hex(), sums_}; }

Status check_plan(const VerifyPlan& plan, std::uint64_t byte_count) {
  return plan.lane_bytes == 0 ? Status() : check_lanes(byte_count, plan.lane_bytes, 0);
}

Status check_target(std::span<const std::uint8_t> blob, std::span<const std::uint8_t> base,
                    std::span<const std::uint8_t> out) {
  if (base.size() != out.size()) {
    return Status::invalid_input("out has " + std::to_string(out.size()) + " bytes, base has " +
                                 std::to_string(base.size()) + "; they must agree");
  }
  if (base.data() != out.data() && overlap(base, out)) {
    return Status::invalid_input("out overlaps base; it must be base itself or disjoint from it");
  }
  if (overlap(blob, out)) {
    return Status::invalid_input("out overlaps blob; they must be disjoint");
  }
  return {};
}

Result<Verified> digest_verify(const Kernels& kernels, std::span<const std::uint8_t> source,
                               const VerifyPlan& plan) {
  if (Status status = check_plan(plan, source.size()); !status.ok()) {
    return status;
  }
  VerifyPass pass(kernels, plan);
  for (std::size_t begin = 0; begin < source.size(); begin += kPieceBytes) {
    pass.feed(source.subspan(begin, std::min(kPieceBytes, source.size() - begin)));
  }
  return pass.result();
}

Result<Verified> copy_verify(const Kernels& kernels, std::span<const std::uint8_t> source,
                             std::span<std::uint8_t> out, const VerifyPlan& plan) {
  for (const Status& status : {check_target({}, source, out), check_plan(plan, source.size())}) {
    if (!status.ok()) {
      return status;
    }
  }
  VerifyPass pass(kernels, plan);
  for (std::size_t begin = 0; begin < source.size(); begin += kPieceBytes) {
    const std::size_t count = std::min(kPieceBytes, source.size() - begin);
    if (out.data() != source.data()) {
      std::memcpy(out.data() + begin, source.data() + begin, count);
    }
    pass.feed(out.subspan(begin, count));
  }
  return pass.result();
}

}  // namespace stitch
