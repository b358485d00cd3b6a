// SPDX-License-Identifier: MIT
// GEMMs of model sizes, too large for the reference, against a GEMM of the same FP8 values computed on the
// GPU in double precision, at the bounds of a correct kernel (a forgotten promotion to FP32 or one wrong
// scale exceeds them).
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/hopper_ops.h"
#include "tests/support/cases.h"
#include "tests/support/tensors.h"

#include <cuda_runtime.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <vector>

namespace fp8flow::test {
namespace {

using L = ScaleLayout;
using op::GemmForm;

constexpr int kTile = 16;

// d[i, j] = sum over k of a[i * a_row + k * a_k] * b[j * b_row + k * b_k], ascending k, in double. One thread
// an element of d, tiles of both operands in shared memory; a barrier before and after each tile is used.
__global__ void gemm_in_double_kernel(const float* a, int64_t a_row, int64_t a_k, const float* b,
                                      int64_t b_row, int64_t b_k, double* d, int64_t rows, int64_t cols,
                                      int64_t contraction) {
    __shared__ double a_tile[kTile][kTile + 1], b_tile[kTile][kTile + 1];
    const int64_t i = static_cast<int64_t>(blockIdx.y) * kTile + threadIdx.y,
                  j0 = static_cast<int64_t>(blockIdx.x) * kTile, j = j0 + threadIdx.x;
    double sum = 0;
    for (int64_t k0 = 0; k0 < contraction; k0 += kTile) {
        const int64_t k = k0 + threadIdx.x;
        const bool inside = k < contraction;
        a_tile[threadIdx.y][threadIdx.x] = inside && i < rows ? a[i * a_row + k * a_k] : 0;
        b_tile[threadIdx.y][threadIdx.x] =
            inside && j0 + threadIdx.y < cols ? b[(j0 + threadIdx.y) * b_row + k * b_k] : 0;
        __syncthreads();
        for (int step = 0; step < kTile; ++step) sum += a_tile[threadIdx.y][step] * b_tile[threadIdx.x][step];
        __syncthreads();
    }
    if (i < rows && j < cols) d[i * cols + j] = sum;
}

// Values of a cheap generator, since these tensors are large, of mixed sign: FP8 bytes over four binades,
// other types multiples of 1/512.
void fill_fast(const TensorView& view, uint32_t seed) {
    uint32_t state = seed * 2654435761u + 12345u;
    for (int64_t i = 0; i < view.numel(); ++i) {
        state = state * 1664525u + 1013904223u;
        const uint32_t word = state >> 8;
        if (is_fp8(view.dtype))  // sign and mantissa as they come, exponents in the middle
            view.bytes_ptr()[i] = static_cast<uint8_t>((word & 0x87u) | ((5 + (word >> 8) % 4) << 3));
        else
            set(view, i, (static_cast<double>(word % 2001) - 1000) / 512);
    }
}

// GEMMs on one GPU and the same in double; frees everything it allocates.
class GemmDouble : public testing::Test {
protected:
    ~GemmDouble() override {
        for (void* memory : memory_) gpu_.device().free(memory);
    }

    TensorView on_gpu(TensorView host) {
        if (!host) return host;
        void* data = allocate(host.bytes());
        gpu_.device().copy_in(data, host.data, static_cast<std::size_t>(host.bytes()));
        host.data = data;
        return host;
    }
    ScaledTensor on_gpu(const HostScaled& host) {
        return {on_gpu(host.data.view()), on_gpu(host.scales.view()), host.layout};
    }
    RowGroups on_gpu(RowGroups groups) {
        groups.counts = on_gpu(groups.counts);
        groups.offsets = on_gpu(groups.offsets);
        return groups;
    }
    void* allocate(int64_t bytes) {
        memory_.push_back(gpu_.device().allocate(static_cast<std::size_t>(bytes)));
        return memory_.back();
    }
    // The operand's values; exact, because scales are powers of two.
    TensorView values_of(const ScaledTensor& operand, const RowGroups& groups = {}) {
        TensorView values = operand.data;
        values.dtype = DType::f32;
        values.data = allocate(values.bytes());
        if (operand.layout == L::none)
            gpu_.cast({.x = operand.data, .y = values});
        else
            gpu_.dequantize({.src = operand, .groups = groups, .dst = values});
        return values;
    }
    struct Strides {
        const float* data;
        int64_t row, k;
    };
    std::vector<double> gemm_in_double(Strides a, Strides b, int64_t rows, int64_t cols,
                                       int64_t contraction) {
        std::vector<double> result(static_cast<std::size_t>(rows * cols));
        if (result.empty()) return result;
        auto* device = static_cast<double*>(allocate(rows * cols * static_cast<int64_t>(sizeof(double))));
        const dim3 grid(static_cast<unsigned>(ceil_div(cols, kTile)),
                        static_cast<unsigned>(ceil_div(rows, kTile)));
        gemm_in_double_kernel<<<grid, dim3(kTile, kTile)>>>(a.data, a.row, a.k, b.data, b.row, b.k, device,
                                                            rows, cols, contraction);
        gpu_.device().copy_out(result.data(), device, result.size() * sizeof(double));
        return result;
    }
    HostTensor to_host(const TensorView& device) {
        HostTensor host(device.dtype, device.dims, device.rank);
        gpu_.device().copy_out(host.view().data, device.data, static_cast<std::size_t>(device.bytes()));
        return host;
    }
    // `count` elements of d from `first` on equal the result, within what rounding leaves.
    static void expect_result(const TensorView& d, int64_t first, const std::vector<double>& wanted) {
        double error = 0, energy = 0;
        for (std::size_t i = 0; i < wanted.size(); ++i) {
            const double difference = get(d, first + static_cast<int64_t>(i)) - wanted[i];
            error += difference * difference;
            energy += wanted[i] * wanted[i];
        }
        const double bound = d.dtype == DType::f32 ? 1e-7 : 4e-6;
        // written so that a NaN fails
        EXPECT_TRUE(error <= bound * energy) << "NMSE " << error / energy << " of " << wanted.size();
    }

    HopperOps gpu_;
    std::vector<void*> memory_;
};

constexpr GemmBackend kBackends[] = {GemmBackend::native, GemmBackend::cublaslt};  // of dense GEMMs
std::string text(GemmBackend backend) { return backend == GemmBackend::native ? "native" : "cublaslt"; }

struct Formats {
    DType dtype;
    L a, b;
};

HostScaled operand(const Formats& f, L layout, std::initializer_list<int64_t> shape, uint32_t seed) {
    HostScaled t(f.dtype, shape, layout);
    fill_fast(t.data, seed);
    if (t.scales.view()) fill_pow2(t.scales, seed, -6, 2);
    return t;
}

TEST_F(GemmDouble, Dense) {
    struct Size {
        int64_t rows, cols, contraction;
    };
    const Formats formats[] = {{DType::bf16, L::none, L::none},
                               {DType::e4m3, L::vec128, L::block128},
                               {DType::e4m3, L::row, L::row},
                               {DType::e4m3, L::tensor, L::tensor},
                               {DType::e4m3, L::mx32, L::mx32}};
    for (const Size& s : {Size{1000, 2048, 7168}, Size{4096, 512, 2048}, Size{129, 7168, 4096}})
        for (const Formats& f : formats) {
            if (too_large_here(s.rows * s.cols * s.contraction / 32)) continue;
            const ScaledTensor a = on_gpu(operand(f, f.a, {s.rows, s.contraction}, 1)),
                               b = on_gpu(operand(f, f.b, {s.cols, s.contraction}, 2));
            const std::vector<double> wanted =
                gemm_in_double({values_of(a).as<float>(), s.contraction, 1},
                               {values_of(b).as<float>(), s.contraction, 1}, s.rows, s.cols, s.contraction);
            for (const DType dtype : {DType::bf16, DType::f32})
                for (const GemmBackend backend : kBackends) {
                    SCOPED_TRACE(fmt::format("{} {} {} -> {}, {} x {} x {}", text(backend), name_of(f.dtype),
                                             name_of(f.a), name_of(dtype), s.rows, s.cols, s.contraction));
                    gpu_.choose_kernels({.gemm = backend});
                    const TensorView d = on_gpu(HostTensor(dtype, {s.rows, s.cols}));
                    gpu_.gemm({.a = a, .b = b, .d = d});
                    expect_result(to_host(d), 0, wanted);
                }
        }
}

// Skewed groups: most rows with one expert, some with none.
const std::vector<int64_t> kCounts = {0, 1, 127, 2500, 128, 0, 129, 300};

TEST_F(GemmDouble, Grouped) {
    const int64_t cols = 1024, contraction = 7168;
    const Formats formats[] = {{DType::bf16, L::none, L::none},       {DType::e4m3, L::vec128, L::block128},
                               {DType::e5m2, L::vec128, L::block128}, {DType::e4m3, L::row, L::row},
                               {DType::e4m3, L::tensor, L::tensor},   {DType::e4m3, L::mx32, L::mx32}};
    const GroupsFixture groups(kCounts, 128);
    if (too_large_here(groups.total() * cols * contraction / 32)) return;
    const RowGroups gpu_groups = on_gpu(RowGroups(groups));
    const int64_t G = groups.num_groups(), rows = groups.capacity();
    for (const Formats& f : formats) {
        const ScaledTensor a = on_gpu(operand(f, f.a, {rows, contraction}, 3)),
                           b = on_gpu(operand(f, f.b, {G, cols, contraction}, 4));
        const float *a_values = values_of(a).as<float>(), *b_values = values_of(b).as<float>();
        std::vector<std::vector<double>> wanted;
        for (int64_t g = 0; g < G; ++g)
            wanted.push_back(gemm_in_double({a_values + groups.first(g) * contraction, contraction, 1},
                                            {b_values + g * cols * contraction, contraction, 1},
                                            groups.count(g), cols, contraction));
        for (const DType dtype : {DType::bf16, DType::f32}) {
            SCOPED_TRACE(fmt::format("{} {} -> {}", name_of(f.dtype), name_of(f.a), name_of(dtype)));
            const TensorView d = on_gpu(HostTensor(dtype, {rows, cols}));
            gpu_.grouped_gemm({.a = a, .b = b, .groups = gpu_groups, .d = d});
            const HostTensor got = to_host(d);
            for (int64_t g = 0; g < G; ++g)
                if (groups.count(g) > 8)  // with fewer rows roundings of single elements do not average out
                    expect_result(got, groups.first(g) * cols, wanted[static_cast<std::size_t>(g)]);
        }
    }
}

TEST_F(GemmDouble, GroupedWgrad) {
    const int64_t n = 512, k = 1024;
    const Formats formats[] = {{DType::bf16, L::none, L::none},     {DType::e4m3, L::tile128, L::tile128},
                               {DType::e4m3, L::vec128, L::vec128}, {DType::e4m3, L::group_row, L::group_row},
                               {DType::e4m3, L::tensor, L::tensor}, {DType::e4m3, L::mx32, L::mx32}};
    const GroupsFixture groups(kCounts, 128);
    if (too_large_here(groups.total() * n * k / 32)) return;
    const RowGroups gpu_groups = on_gpu(RowGroups(groups));
    const int64_t G = groups.num_groups(), rows = groups.capacity();
    for (const Formats& f : formats) {
        const bool plain = f.a == L::none;
        const auto make = [&](int64_t width, uint32_t seed) {
            HostScaled t =
                plain ? HostScaled(f.dtype, {rows, width}, f.a) : HostScaled(f.dtype, {width, rows}, f.a, G);
            fill_fast(t.data, seed);
            if (t.scales.view()) fill_pow2(t.scales, seed, -6, 2);
            // FP8 copies have zeros in their pads (kernels/ops/gemm.h)
            uint8_t* fp8 = t.data.view().bytes_ptr();
            for (int64_t row = 0; !plain && row < groups.total(); ++row)
                for (int64_t i = 0; groups.is_pad(row) && i < width; ++i) fp8[i * rows + row] = 0;
            return on_gpu(t);
        };
        const ScaledTensor dy = make(n, 5), x = make(k, 6);
        const bool routed_columns = f.a == L::tile128 || f.a == L::group_row;
        const float *dy_values = values_of(dy, routed_columns ? gpu_groups : RowGroups{}).as<float>(),
                    *x_values = values_of(x, routed_columns ? gpu_groups : RowGroups{}).as<float>();
        std::vector<std::vector<double>> wanted;
        for (int64_t g = 0; g < G; ++g) {
            const int64_t first = groups.first(g);
            wanted.push_back(plain ? gemm_in_double({dy_values + first * n, 1, n},
                                                    {x_values + first * k, 1, k}, n, k, groups.count(g))
                                   : gemm_in_double({dy_values + first, rows, 1}, {x_values + first, rows, 1},
                                                    n, k, groups.count(g)));
        }
        for (const Gradient mode : {Gradient::overwrite, Gradient::accumulate}) {
            SCOPED_TRACE(fmt::format("{} {} {}", name_of(f.dtype), name_of(f.a),
                                     mode == Gradient::overwrite ? "overwrite" : "accumulate"));
            HostTensor before(DType::f32, {G, n, k});
            if (mode == Gradient::accumulate) fill_fast(before, 7);
            const TensorView dw = on_gpu(before.view());
            gpu_.grouped_gemm_wgrad({.dy = dy, .x = x, .groups = gpu_groups, .mode = mode, .dw = dw});
            const HostTensor got = to_host(dw);
            for (int64_t g = 0; g < G; ++g) {
                std::vector<double> want = wanted[static_cast<std::size_t>(g)];
                for (std::size_t i = 0; mode == Gradient::accumulate && i < want.size(); ++i)
                    want[i] += before(g * n * k + static_cast<int64_t>(i));
                expect_result(got, g * n * k, want);
            }
        }
    }
}

}  // namespace
}  // namespace fp8flow::test
