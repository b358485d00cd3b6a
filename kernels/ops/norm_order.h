// SPDX-License-Identifier: MIT
// The order of summation of RMSNorm and its backward, part of their contract: both backends follow it, so
// that they agree bit for bit. The numbers define bits: another number is another result. Why these numbers
// suit a Hopper GPU: kernels/hopper/norm/norm_rows.h.
#pragma once

#include "kernels/core/scaled_tensor.h"

namespace fp8flow::op {

// A sum over a row of H columns runs in kNormStrands strands: units of kNormUnit neighbouring columns, unit u
// to strand u % kNormStrands (fma, ascending; empty strands are 0). Each 32 neighbouring strands are added in
// halves (s + (s+16), then + 8, 4, 2, 1), and the eight sums of these pairwise: ((0+4)+(2+6)) +
// ((1+5)+(3+7)). A row of more than kNormSegment columns is cut into the fewest segments of at most that
// many, each of norm_segment_cols columns (the last: the rest) and summed like this; their sums are added in
// ascending order.
constexpr int64_t kNormStrands = 256, kNormUnit = 8, kNormSegment = 8192;
constexpr int64_t norm_segments(int64_t cols) {
    return cols > kNormSegment ? (cols + kNormSegment - 1) / kNormSegment : 1;
}
constexpr int64_t norm_segment_cols(int64_t cols) {
    const int64_t segments = norm_segments(cols), share = (cols + segments - 1) / segments;
    return (share + kBlock - 1) / kBlock * kBlock;
}

// dgamma, a sum over T rows, runs in P = gamma_parts(H) parts of K = gamma_chunks(H) chunks. Chunk c has rows
// c, c + K*P, c + 2*K*P, ... and is summed by fma, ascending. The sums of chunks p, p + P, ... are added,
// ascending: part p. Then those of kGammaGroup neighbouring parts, ascending; then these, ascending.
constexpr int64_t kGammaParts = 132, kGammaGroup = 11;  // of a row of one segment; parts of a group
constexpr int64_t kGammaSegmentParts[] = {66, 41, 29, 22, 18, 14, 13};  // of 2 to 8 segments and more
constexpr int64_t kNarrowRow = 2048, kFewSegments = 4;
constexpr int64_t gamma_parts(int64_t cols) {
    const int64_t segments = norm_segments(cols);
    return segments == 1 ? kGammaParts : kGammaSegmentParts[segments < 8 ? segments - 2 : 6];
}
constexpr int64_t gamma_chunks(int64_t cols) {
    return cols <= kNarrowRow ? 4 : cols <= 2 * kNarrowRow || norm_segments(cols) > kFewSegments ? 2 : 1;
}

}  // namespace fp8flow::op
