// SPDX-License-Identifier: MIT
// RMSNorm forward, forward with FP8 outputs, backward. Contracts: kernels/ops/norm.h.
#include "kernels/reference/quantizers.h"
#include "kernels/reference/reference_ops.h"

#include <algorithm>

namespace fp8flow {

using namespace reference;

namespace {

// The effective weight in fp32.
std::vector<float> effective_gamma(const TensorView& gamma, op::GammaForm form) {
    std::vector<float> g(static_cast<std::size_t>(gamma.numel()));
    load_floats(gamma, 0, gamma.numel(), g.data());
    if (form == op::GammaForm::zero_centered)
        for (float& x : g) x = 1.0f + x;
    return g;
}

// The sum of a[i] * b[i] over a segment in strands, in the order that kernels/ops/norm.h states.
float segment_dot(const float* a, const float* b, int64_t width) {
    constexpr int64_t kStrands = op::kNormStrands, kUnit = op::kNormUnit, kNeighbours = 32;
    float strands[kStrands] = {};
    for (int64_t first = 0; first < width; first += kUnit) {
        float& strand = strands[first / kUnit % kStrands];
        for (int64_t i = first; i < std::min(width, first + kUnit); ++i)
            strand = fma_float(a[i], b[i], strand);
    }
    float sums[kStrands / kNeighbours];
    for (int64_t n = 0; n < kStrands / kNeighbours; ++n)
        sums[n] = sum_in_halves<kNeighbours>(strands + n * kNeighbours);
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}
float strand_dot(const float* a, const float* b, int64_t width) {
    const int64_t segment = op::norm_segment_cols(width);
    float sum = segment_dot(a, b, std::min(width, segment));
    for (int64_t first = segment; first < width; first += segment)
        sum += segment_dot(a + first, b + first, std::min(segment, width - first));
    return sum;
}

// y = x * rstd * g in place; returns rstd.
float normalize(float* x, const std::vector<float>& g, float eps) {
    const int64_t width = static_cast<int64_t>(g.size());
    const float mean = div_float(strand_dot(x, x, width), static_cast<float>(width));
    const float rstd = div_float(1.0f, sqrt_float(mean + eps));
    for (int64_t i = 0; i < width; ++i) x[i] = x[i] * rstd * g[static_cast<std::size_t>(i)];
    return rstd;
}

bool is_block_layout(const ScaledTensor& t) {
    return t.layout == ScaleLayout::vec128 || t.layout == ScaleLayout::vec128_wire;
}

// The scales of `rows` as fp32 [H/128, T], whichever layout they are stored in.
std::vector<float> scales_by_block(const ScaledTensor& rows) {
    const int64_t tokens = rows.data.dim(0), blocks = ceil_div(rows.data.cols(), kBlock);
    std::vector<float> stored(static_cast<std::size_t>(tokens * blocks));
    load_floats(rows.scales, 0, tokens * blocks, stored.data());
    if (rows.layout == ScaleLayout::vec128) return stored;
    std::vector<float> scales(stored.size());
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t b = 0; b < blocks; ++b)
            scales[static_cast<std::size_t>(b * tokens + t)] =
                stored[static_cast<std::size_t>(t * blocks + b)];
    return scales;
}

}  // namespace

void ReferenceOps::do_rms_norm(const op::RmsNorm& args, const Launch&) {
    const int64_t rows = args.x.rows(), width = args.x.cols();
    const std::vector<float> g = effective_gamma(args.gamma, args.gamma_form);
    float* rstd = args.rstd.as<float>();
    for_each_row(rows, width, [&](int64_t row, float* values) {
        load_row(args.x, row, values);
        rstd[row] = normalize(values, g, args.eps);
        store_row(args.y, row, values);
    });
}

void ReferenceOps::do_rms_norm_quantize(const op::RmsNormQuantize& args, const Launch&) {
    const int64_t tokens = args.x.rows(), width = args.x.cols();
    const std::vector<float> g = effective_gamma(args.gamma, args.gamma_form);
    float* rstd = args.rstd.as<float>();
    const bool blocks = is_block_layout(args.rows);
    const bool row_tensor = args.rows && !blocks,
               transposed_tensor = args.transposed.layout == ScaleLayout::tensor;
    const float row_multiplier = row_tensor ? div_float(1.0f, *args.rows.scales.as<float>()) : 0.0f;
    const float column_multiplier =
        transposed_tensor ? div_float(1.0f, *args.transposed.scales.as<float>()) : 0.0f;
    const QuantizeRule rule = {args.scale_format, MxRounding::rceil};
    float amax = 0.0f;
#pragma omp parallel
    {
        std::vector<float> values(static_cast<std::size_t>(width));
        std::vector<uint8_t> column_fp8(transposed_tensor ? static_cast<std::size_t>(width) : 0);
        float part = 0.0f;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < tokens; ++row) {
            load_row(args.x, row, values.data());
            rstd[row] = normalize(values.data(), g, args.eps);
            if (args.amax) part = std::max(part, amax_of(values.data(), width));
            if (row_tensor)
                encode(values.data(), width, row_multiplier, args.rows.data.dtype,
                       args.rows.data.bytes_ptr() + row * width);
            if (transposed_tensor) {
                const TensorView& fp8 = args.transposed.data;
                encode(values.data(), width, column_multiplier, fp8.dtype, column_fp8.data());
                for (int64_t i = 0; i < width; ++i)
                    fp8.bytes_ptr()[i * fp8.cols() + row] = column_fp8[static_cast<std::size_t>(i)];
            }
            if (args.y) store_row(args.y, row, values.data());
            if (!blocks) continue;
            for (float& x : values) x = round_bf16(x);
            quantize_row(values.data(), args.rows, row, rule);
        }
#pragma omp critical
        amax = std::max(amax, part);
    }
    if (args.amax) *args.amax.as<float>() = max_ignore_nan(*args.amax.as<float>(), amax);
    if (transposed_tensor) {
        const TensorView& fp8 = args.transposed.data;
        for (int64_t i = 0; i < width; ++i)
            std::fill(fp8.bytes_ptr() + i * fp8.cols() + tokens, fp8.bytes_ptr() + (i + 1) * fp8.cols(),
                      uint8_t{0});
    }
    if (args.transposed.layout == ScaleLayout::tile128) {
        const std::vector<float> scales = scales_by_block(args.rows);
        transpose_tiles({args.rows.data.bytes_ptr(), scales.data(), width, tokens}, args.rows.data.dtype,
                        column_ranges({}, tokens, args.transposed.data), args.transposed);
    }
}

void ReferenceOps::do_rms_norm_backward(const op::RmsNormBackward& args, const Launch&) {
    const int64_t rows = args.x.rows(), width = args.x.cols(), parts = op::gamma_parts(width),
                  chunks = op::gamma_chunks(width) * parts;
    const std::size_t w = static_cast<std::size_t>(width);
    const std::vector<float> g = effective_gamma(args.gamma, args.gamma_form);
    const float* rstd = args.rstd.as<float>();
    std::vector<float> partials(static_cast<std::size_t>(chunks) * w, 0.0f);
#pragma omp parallel
    {
        std::vector<float> dy(w), x(w), dyg(w), residual(w);
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            float* partial = partials.data() + chunk * width;
            for (int64_t row = chunk; row < rows; row += chunks) {
                load_row(args.dy, row, dy.data());
                load_row(args.x, row, x.data());
                const float r = rstd[row];
                for (std::size_t i = 0; i < w; ++i) {
                    partial[i] = fma_float(dy[i], x[i] * r, partial[i]);
                    dyg[i] = dy[i] * g[i];
                }
                const float mean =
                    div_float(strand_dot(dyg.data(), x.data(), width), static_cast<float>(width));
                const float c = r * r * mean;
                for (std::size_t i = 0; i < w; ++i) dyg[i] = r * (dyg[i] - x[i] * c);
                if (args.dresidual) {
                    load_row(args.dresidual, row, residual.data());
                    for (std::size_t i = 0; i < w; ++i) dyg[i] += residual[i];
                }
                store_row(args.dx, row, dyg.data());
            }
        }
    }
    float* dgamma = args.dgamma.as<float>();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < width; ++i) {
        float sum = 0.0f;
        for (int64_t first = 0; first < parts; first += op::kGammaGroup) {
            float group = 0.0f;
            for (int64_t part = first; part < std::min(parts, first + op::kGammaGroup); ++part) {
                float of_part = partials[static_cast<std::size_t>(part * width + i)];
                for (int64_t chunk = part + parts; chunk < chunks; chunk += parts)
                    of_part += partials[static_cast<std::size_t>(chunk * width + i)];
                group += of_part;
            }
            sum += group;
        }
        dgamma[i] = args.dgamma_mode == Gradient::accumulate ? dgamma[i] + sum : sum;
    }
}

}  // namespace fp8flow
