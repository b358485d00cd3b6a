// SPDX-License-Identifier: MIT
// The FP8 grouped GEMM alone, on buffers and a stream of the caller's: D[r] = A[r] W[expert of r]^T. Rows are
// sorted by expert, each expert's padded to 128; the sizes of the groups are device data. Needs a Hopper GPU;
// without one it says so.
#include <cuda_runtime.h>
#include <fp8flow/fp8flow.h>
#include <fp8flow/kernels/hopper/runtime/device_query.h>

#include <cmath>
#include <cstdio>
#include <vector>

using namespace fp8flow;

namespace {

constexpr int64_t kExperts = 8, kRows = 1024, kN = 4096, kK = 7168, kM = kExperts * kRows;

// A tensor in memory that the caller owns (and here never gives back).
TensorView on_gpu(DType dtype, std::initializer_list<int64_t> shape) {
    const TensorView view = make_view(nullptr, dtype, shape);
    void* data = nullptr;
    if (cudaMalloc(&data, static_cast<size_t>(view.bytes())) != cudaSuccess) std::abort();
    return make_view(data, dtype, shape);
}

ScaledTensor fp8_on_gpu(std::initializer_list<int64_t> shape, ScaleLayout layout) {
    ScaledTensor tensor{.data = on_gpu(DType::e4m3, shape), .layout = layout};
    const ScaleShape s = scale_shape(layout, tensor.data);
    tensor.scales = s.rank == 3 ? on_gpu(s.dtype, {s.dims[0], s.dims[1], s.dims[2]})
                                : on_gpu(s.dtype, {s.dims[0], s.dims[1]});
    return tensor;
}

TensorView words(const std::vector<int64_t>& values) {
    const TensorView view = on_gpu(DType::i64, {static_cast<int64_t>(values.size())});
    cudaMemcpy(view.data, values.data(), values.size() * sizeof(int64_t), cudaMemcpyHostToDevice);
    return view;
}

}  // namespace

int main() {
    if (hopper::device_count() == 0) {
        std::printf("no Hopper GPU: %s\n", hopper::unavailable_reason().c_str());
        return 0;
    }
    const auto ops = hopper::make_ops(0);
    cudaStream_t stream = nullptr;
    cudaStreamCreate(&stream);
    const Launch launch{.stream = {stream}};

    std::vector<int64_t> counts(kExperts, kRows), offsets;
    for (int64_t e = 0; e <= kExperts; ++e) offsets.push_back(e * kRows);
    const RowGroups groups{.num_groups = kExperts,
                           .counts = words(counts),
                           .offsets = words(offsets),
                           .row_capacity = kM,
                           .alignment = 128};

    const TensorView a = on_gpu(DType::bf16, {kM, kK}), w = on_gpu(DType::f32, {kExperts, kN, kK}),
                     d = on_gpu(DType::bf16, {kM, kN});
    std::vector<Bf16> rows(static_cast<size_t>(a.numel()));
    std::vector<float> weights(static_cast<size_t>(w.numel()));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = to_bf16(std::sin(static_cast<float>(i % 9973)));
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = std::cos(static_cast<float>(i % 9967)) / 64;
    cudaMemcpy(a.data, rows.data(), rows.size() * sizeof(Bf16), cudaMemcpyHostToDevice);
    cudaMemcpy(w.data, weights.data(), weights.size() * sizeof(float), cudaMemcpyHostToDevice);

    const ScaledTensor qa = fp8_on_gpu({kM, kK}, ScaleLayout::vec128),
                       qw = fp8_on_gpu({kExperts, kN, kK}, ScaleLayout::block128);
    ops->quantize_rows({.src = a, .groups = groups, .dst = qa}, launch);
    ops->quantize_weight({.src = w, .fprop = qw}, launch);
    const auto multiply = [&] { ops->grouped_gemm({.a = qa, .b = qw, .groups = groups, .d = d}, launch); };
    multiply();
    cudaEvent_t begin = nullptr, end = nullptr;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    cudaEventRecord(begin, stream);
    constexpr int kTimes = 20;
    for (int i = 0; i < kTimes; ++i) multiply();
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin, end);
    std::printf("FP8 grouped GEMM, %ld experts, [%ld, %ld] x [%ld, %ld]: %.1f us, %.0f TFLOP/s\n", kExperts,
                kRows, kK, kN, kK, milliseconds * 1000 / kTimes,
                2.0 * kM * kN * kK * kTimes / milliseconds / 1e9);

    // one row against the products in double
    std::vector<Bf16> out(kN);
    const int64_t row = 3 * kRows + 5;
    cudaMemcpy(out.data(), d.as<Bf16>() + row * kN, kN * sizeof(Bf16), cudaMemcpyDeviceToHost);
    double error = 0, size = 0;
    for (int64_t n = 0; n < kN; n += 61) {
        double sum = 0;
        for (int64_t k = 0; k < kK; ++k)
            sum += static_cast<double>(to_float(rows[row * kK + k])) * weights[(3 * kN + n) * kK + k];
        error += std::pow(to_float(out[n]) - sum, 2), size += sum * sum;
    }
    std::printf("relative error against double: %.4f\n", std::sqrt(error / size));
    return std::sqrt(error / size) < 0.1 ? 0 : 1;
}
