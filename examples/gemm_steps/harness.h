// SPDX-License-Identifier: MIT
// What the steps share: operands of an FP8 grouped GEMM, a check against products in double, a timer.
//   D[r, n] = sum over blocks kb of  a_scales[kb, r] b_scales[e, n / 128, kb]  sum over k in kb of  A[r, k]
//   B[e, n, k]
// Row r belongs to expert e = r / rows. E4M3 operands, FP32 scales of 1x128 (A) and 128x128 (B), BF16 D.
// rows, n and k are multiples of 128.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

struct Problem {
    int groups, rows, n, k;
    const uint8_t* a;       // [groups * rows, k]
    const float* a_scales;  // [k / 128, groups * rows]
    const uint8_t* b;       // [groups, n, k]
    const float* b_scales;  // [groups, n / 128, k / 128]
    __nv_bfloat16* d;       // [groups * rows, n]
    __host__ __device__ int m() const { return groups * rows; }
};

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

__device__ __forceinline__ float e4m3_to_float(uint8_t code) {
    __nv_fp8_e4m3 value;
    value.__x = code;
    return static_cast<float>(value);
}

// A number in [0, 1) of each index.
__host__ __device__ inline float unit(uint64_t i) {
    i = (i + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
    i = (i ^ (i >> 29)) * 0x94D049BB133111EB;
    return static_cast<float>(i >> 40) * 0x1p-24f;
}

// About normal, as quantised rows are: the largest of a block near 448.
__global__ void fill_fp8(uint8_t* fp8, int64_t count, uint64_t seed) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        float sum = -2;
        for (uint64_t j = 0; j < 4; ++j) sum += unit(seed + 4 * static_cast<uint64_t>(i) + j);
        fp8[i] = __nv_fp8_e4m3(sum * 224).__x;
    }
}
__global__ void fill_scales(float* scales, int64_t count, uint64_t seed) {
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll)
        scales[i] = (0.5f + unit(seed + static_cast<uint64_t>(i))) / 224;
}

template <class T> T* on_gpu(int64_t count) {
    void* data = nullptr;
    check(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
    return static_cast<T*>(data);
}
template <class T> std::vector<T> on_host(const T* from, int64_t count) {
    std::vector<T> to(static_cast<size_t>(count));
    check(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost), "the kernel");
    return to;
}

// The error of 32 x 32 elements of D: the norm of the differences over that of the products in double. One
// rounding to BF16 is 1.7e-3.
inline double error_of(const Problem& p) {
    const int blocks = p.k / 128;
    const auto a_scales = on_host(p.a_scales, int64_t(blocks) * p.m());
    const auto b_scales = on_host(p.b_scales, int64_t(p.groups) * (p.n / 128) * blocks);
    double errors = 0, norm = 0;
    for (int i = 0; i < 32; ++i) {
        const int row = static_cast<int>(unit(1000 + i) * p.m()), expert = row / p.rows;
        const auto a = on_host(p.a + int64_t(row) * p.k, p.k);
        const auto d = on_host(p.d + int64_t(row) * p.n, p.n);
        for (int j = 0; j < 32; ++j) {
            const int n = static_cast<int>(unit(2000 + 32 * i + j) * p.n);
            const auto b = on_host(p.b + (int64_t(expert) * p.n + n) * p.k, p.k);
            double sum = 0;
            for (int k = 0; k < p.k; ++k) {
                __nv_fp8_e4m3 x, y;
                x.__x = a[k], y.__x = b[k];
                sum += double(float(x)) * double(float(y)) * a_scales[int64_t(k / 128) * p.m() + row] *
                       b_scales[(int64_t(expert) * (p.n / 128) + n / 128) * blocks + k / 128];
            }
            norm += sum * sum;
            errors += (sum - double(float(d[n]))) * (sum - double(float(d[n])));
        }
    }
    return std::sqrt(errors / norm);
}

// Checks and times a step. Arguments: groups rows n k, default 32 1024 4096 7168 (the first GEMM of
// DeepSeek-V3's experts). Exit status 1 if the error is above 4e-3.
template <class Launch> int run(const char* name, int argc, char** argv, const Launch& launch) {
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        std::printf("%s: no GPU\n", name);
        return 0;
    }
    const auto argument = [&](int i, int otherwise) { return argc > i ? std::atoi(argv[i]) : otherwise; };
    Problem p{
        .groups = argument(1, 32), .rows = argument(2, 1024), .n = argument(3, 4096), .k = argument(4, 7168)};
    if (p.groups < 1 || p.rows < 128 || p.n < 128 || p.k < 128 || (p.rows | p.n | p.k) % 128 != 0) {
        std::fprintf(stderr, "usage: %s groups rows n k    (rows, n, k: multiples of 128)\n", name);
        return 2;
    }
    const int64_t m = p.m(), of_a = m * p.k, of_b = int64_t(p.groups) * p.n * p.k;
    uint8_t *a = on_gpu<uint8_t>(of_a), *b = on_gpu<uint8_t>(of_b);
    float *a_scales = on_gpu<float>(of_a / 128), *b_scales = on_gpu<float>(of_b / 128 / 128);
    p.d = on_gpu<__nv_bfloat16>(m * p.n);
    fill_fp8<<<2048, 256>>>(a, of_a, 1);
    fill_fp8<<<2048, 256>>>(b, of_b, 2);
    fill_scales<<<2048, 256>>>(a_scales, of_a / 128, 3);
    fill_scales<<<2048, 256>>>(b_scales, of_b / 128 / 128, 4);
    check(cudaMemset(p.d, 0xff, static_cast<size_t>(m * p.n) * 2),
          "cudaMemset");  // NaN: what is not written is seen
    p.a = a, p.b = b, p.a_scales = a_scales, p.b_scales = b_scales;

    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "cudaEventCreate"), check(cudaEventCreate(&end), "cudaEventCreate");
    std::vector<float> times;
    float total = 0;
    for (int call = 0; call < 3 || (call < 30 && total < 1000); ++call) {  // the first one warms up
        cudaEventRecord(begin);
        launch(p);
        cudaEventRecord(end);
        check(cudaGetLastError(), name);
        check(cudaEventSynchronize(end), name);
        times.push_back(0);
        cudaEventElapsedTime(&times.back(), begin, end);
        total += times.back();
    }
    times.erase(times.begin());
    std::sort(times.begin(), times.end());
    const double ms = times[times.size() / 2], error = error_of(p);
    std::printf("%-16s %8.3f ms %8.1f TFLOP/s   error %.1e\n", name, ms, 2e-9 * double(m) * p.n * p.k / ms,
                error);
    return error <= 4e-3 ? 0 : 1;
}
