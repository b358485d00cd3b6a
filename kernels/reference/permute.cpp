// SPDX-License-Identifier: MIT
// The row movers: permute + pad, unpermute + unpad and the gradient of its merging weights, and the unfused
// pair pad / unpad. Copies move bytes, whatever the dtype; sums run in fp32 in the order of recv_rows.
#include "kernels/core/error.h"
#include "kernels/reference/reference_ops.h"
#include "kernels/reference/rows.h"

#include <algorithm>
#include <cstring>

namespace fp8flow {

namespace {

using reference::base_of;
using reference::check_rows_named;
using reference::group_ranges;

// Scales of one row (vec128_wire or vec128 in, vec128 out: one float per block, a whole row of scales apart);
// zeros for a pad.
void copy_scales(const ScaledTensor& src, int64_t src_row, const ScaledTensor& dst, int64_t dst_row) {
    const int64_t blocks = dst.scales.dim(0), stride = dst.scales.dim(1);
    float* to = dst.scales.as<float>() + base_of(dst.data) + dst_row;
    if (src_row < 0) {
        for (int64_t b = 0; b < blocks; ++b) to[b * stride] = 0.0f;
        return;
    }
    const int64_t row = base_of(src.data) + src_row;
    if (src.layout == ScaleLayout::vec128) {
        const float* from = src.scales.as<float>() + row;
        for (int64_t b = 0; b < blocks; ++b) to[b * stride] = from[b * src.scales.dim(1)];
    } else if (src.scales.dtype == DType::e8m0) {
        const uint8_t* from = src.scales.bytes_ptr() + row * blocks;
        for (int64_t b = 0; b < blocks; ++b) to[b * stride] = e8m0_to_float(from[b]);
    } else {
        const float* from = src.scales.as<float>() + row * blocks;
        for (int64_t b = 0; b < blocks; ++b) to[b * stride] = from[b];
    }
}

// Row dst_row of dst = row src_row of src, or zeros where src_row is negative. Rows are relative to the
// row_base of each tensor's data, which holds for their scales too.
void copy_row(const ScaledTensor& src, int64_t src_row, const ScaledTensor& dst, int64_t dst_row) {
    const int64_t row_bytes = dst.data.cols() * size_of(dst.data.dtype);
    uint8_t* to = dst.data.bytes_ptr() + (base_of(dst.data) + dst_row) * row_bytes;
    if (src_row < 0) {
        std::memset(to, 0, static_cast<std::size_t>(row_bytes));
    } else {
        const uint8_t* from = src.data.bytes_ptr() + (base_of(src.data) + src_row) * row_bytes;
        std::memcpy(to, from, static_cast<std::size_t>(row_bytes));
    }
    if (dst.layout != ScaleLayout::none) copy_scales(src, src_row, dst, dst_row);
}

// The sum of a[i] * b[i] in strands, in the order that kernels/ops/permute.h states.
float strand_dot(const float* a, const float* b, int64_t width) {
    float strands[op::kProbStrands] = {};
    for (int64_t first = 0; first < width; first += op::kProbUnit) {
        float& strand = strands[first / op::kProbUnit % op::kProbStrands];
        for (int64_t i = first; i < std::min(width, first + op::kProbUnit); ++i)
            strand = fma_float(a[i], b[i], strand);
    }
    return reference::sum_in_halves<op::kProbStrands>(strands);
}

// The same rows at other group offsets; dst rows past the count of a group are zeroed.
void regroup_rows(const ScaledTensor& src, const RowGroups& src_groups, const ScaledTensor& dst,
                  const RowGroups& dst_groups) {
    const int64_t* counts = src_groups.counts.as<int64_t>();
    const int64_t* src_offsets = src_groups.offsets.as<int64_t>();
    const int64_t* dst_offsets = dst_groups.offsets.as<int64_t>();
    group_ranges(src_groups, 0), group_ranges(dst_groups, 0);  // they fit
#pragma omp parallel
    for (int64_t g = 0; g < dst_groups.num_groups; ++g) {
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < dst_offsets[g + 1] - dst_offsets[g]; ++row)
            copy_row(src, row < counts[g] ? src_offsets[g] + row : -1, dst, dst_offsets[g] + row);
    }
}

}  // namespace

void ReferenceOps::do_permute_pad(const op::PermutePad& args, const Launch&) {
    const int32_t* row_source = args.row_source.as<int32_t>() + base_of(args.row_source);
    const int64_t rows = group_ranges(args.groups, 0).back().end;
    check_rows_named(args.row_source, rows, "row_source", args.src.data.dim(0));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) copy_row(args.src, row_source[row], args.dst, row);
}

void ReferenceOps::do_unpermute_unpad(const op::UnpermuteUnpad& args, const Launch&) {
    const int64_t hidden = args.dst.cols(), topk = args.recv_rows.dim(1), base = base_of(args.src);
    const int64_t received = *args.num_rows.as<int64_t>();
    const int32_t* recv_rows = args.recv_rows.as<int32_t>();
    require(received >= 0 && received <= args.recv_rows.dim(0), ExitCode::usage,
            "num_rows is {}, recv_rows {}", received, describe(args.recv_rows));
    check_rows_named(args.recv_rows, received * topk, "recv_rows", args.src.dim(0) - base);
    const float* prob = args.row_prob ? args.row_prob.as<float>() + base_of(args.row_prob) : nullptr;
    reference::for_each_row(received, 2 * hidden, [&](int64_t i, float* __restrict row) {
        float* __restrict sum = row + hidden;
        std::fill_n(sum, hidden, 0.0f);
        for (int64_t k = 0; k < topk && recv_rows[i * topk + k] >= 0; ++k) {
            const int64_t source = recv_rows[i * topk + k];
            reference::load_row(args.src, base + source, row);
            if (prob != nullptr) {
                for (int64_t h = 0; h < hidden; ++h) sum[h] = fma_float(prob[source], row[h], sum[h]);
            } else {
                for (int64_t h = 0; h < hidden; ++h) sum[h] += row[h];
            }
        }
        reference::store_row(args.dst, i, sum);
    });
}

void ReferenceOps::do_unpermute_probs_backward(const op::UnpermuteProbsBackward& args, const Launch&) {
    const int64_t hidden = args.src.cols(), base = base_of(args.src);
    const int32_t* row_source = args.row_source.as<int32_t>() + base_of(args.row_source);
    float* drow_prob = args.drow_prob.as<float>() + base_of(args.drow_prob);
    const int64_t rows = group_ranges(args.groups, 0).back().end;
    check_rows_named(args.row_source, rows, "row_source", args.ddst.dim(0));
    reference::for_each_row(rows, 2 * hidden, [&](int64_t r, float* row) {
        float* const gradient = row + hidden;
        if (row_source[r] < 0) {
            drow_prob[r] = 0.0f;
            return;
        }
        reference::load_row(args.ddst, row_source[r], gradient);
        reference::load_row(args.src, base + r, row);
        drow_prob[r] = strand_dot(gradient, row, hidden);
    });
}

void ReferenceOps::do_pad_rows(const op::PadRows& args, const Launch&) {
    regroup_rows(args.src, args.src_groups, args.dst, args.dst_groups);
}

void ReferenceOps::do_unpad_rows(const op::UnpadRows& args, const Launch&) {
    regroup_rows({.data = args.src}, args.src_groups, {.data = args.dst}, args.dst_groups);
}

}  // namespace fp8flow
