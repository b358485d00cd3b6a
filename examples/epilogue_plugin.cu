// SPDX-License-Identifier: MIT
// Your own epilogue of the FP8 grouped GEMM, compared with this project's kernel: D = alpha A B^T. It
// inherits StoreEpilogue and scales the sums before they are stored; with alpha = 1 the results are equal. In
// the repository, with a program of the preset cuda-release:
//   nvcc -O3 -std=c++20 -arch=sm_90a --expt-relaxed-constexpr -shared -Xcompiler -fPIC -I . -I include
//       examples/epilogue_plugin.cu -o epilogue_plugin.so
//   fp8flow bench grouped_gemm --backend hopper --shape M=32768,G=32,N=4096,K=7168,type=fp8
//       --plugin ./epilogue_plugin.so
#include "kernels/hopper/gemm/sm90/fp8.cu"

#include <fp8flow/plugin.h>

#include <cstring>

namespace fp8flow::hopper::gemm {
namespace {

struct ScaledEpilogue : StoreEpilogue {
    float alpha;

    __device__ __forceinline__ void begin(const WorkTile& tile, float (&sums)[2][64]) const {
        scale(sums[0]);
        StoreEpilogue::begin(tile, sums);
    }
    template <int kChain>
    __device__ __forceinline__ void overlap(const WorkTile& tile, float (&sums)[2][64], uint8_t* rows) const {
        if (kChain == 1) scale(sums[1]);
        StoreEpilogue::overlap<kChain>(tile, sums, rows);
    }

private:
    __device__ __forceinline__ void scale(float (&sum)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] *= alpha;
    }
};

__global__ void __launch_bounds__(kCtaThreads, 1)
    scaled_kernel(const __grid_constant__ GemmProblem problem, const __grid_constant__ CUtensorMap map_a,
                  const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_d,
                  const __grid_constant__ float alpha) {
    run_roles<OverlappedStorage>(
        [&](OverlappedStorage& shared) {
            produce_operands<ScaleMode::rows_tiles>(problem, shared, &map_a, &map_b);
        },
        [&](OverlappedStorage& shared, int warpgroup) {
            Bf16Staging& staging = shared.staging[threadIdx.x / 32 - kWarpgroup / 32];
            overlapped_mainloop<WgmmaE4m3>(problem, shared, warpgroup,
                                           ScaledEpilogue{{problem, &map_d, staging, warpgroup}, alpha});
        },
        [&](auto& shared) { fill_queue<TileScheduler<kFp8StageK>>(problem, shared.queue); });
}

TensorView tensor(const fp8flow_plugin_call& call, const char* name, DType dtype) {
    for (int i = 0; i < call.num_tensors; ++i) {
        const fp8flow_plugin_tensor& one = call.tensors[i];
        if (std::strcmp(one.name, name) != 0 || std::strcmp(one.dtype, name_of(dtype)) != 0) continue;
        TensorView view{.data = one.data, .dtype = dtype, .rank = one.rank};
        for (int k = 0; k < one.rank; ++k) view.dims[k] = one.dims[k];
        return view;
    }
    return {};
}

int64_t number(const fp8flow_plugin_call& call, const char* name) {
    for (int i = 0; i < call.num_numbers; ++i)
        if (std::strcmp(call.numbers[i].name, name) == 0) return static_cast<int64_t>(call.numbers[i].value);
    return 0;
}

// FP8 with row scales on A and tile scales on B, groups of rows, D in BF16.
int scaled_gemm(const fp8flow_plugin_call* call) {
    const op::GroupedGemm args{
        .a = {tensor(*call, "a", DType::e4m3), tensor(*call, "a.scales", DType::f32), ScaleLayout::vec128},
        .b = {tensor(*call, "b", DType::e4m3), tensor(*call, "b.scales", DType::f32), ScaleLayout::block128},
        .groups = {number(*call, "groups.num_groups"), tensor(*call, "groups.counts", DType::i64),
                   tensor(*call, "groups.offsets", DType::i64), number(*call, "groups.row_capacity"),
                   number(*call, "groups.alignment")},
        .d = tensor(*call, "d", DType::bf16)};
    if (call->on_gpu == 0 || !args.a || !args.b || !args.d || args.groups.num_groups == 0 ||
        number(*call, "a.layout") != static_cast<int64_t>(ScaleLayout::vec128) ||
        number(*call, "b.layout") != static_cast<int64_t>(ScaleLayout::block128))
        return 1;
    const GemmCall gemm = call_of(args);
    if (!wgmma_supports(gemm)) return 1;
    const TensorView &a = args.a.data, &b = args.b.data;
    launch_persistent<OverlappedStorage>(scaled_kernel, gemm.problem, Launch{.stream = {call->stream}},
                                         operand_map(gemm.problem.a, {a.rows(), a.cols()}, kTileRows / 2),
                                         operand_map(gemm.problem.b, {b.rows(), b.cols()}, kTileCols / 2),
                                         staging_map(gemm.problem), 1.0f);
    return 0;
}

const fp8flow_plugin_operation operations[] = {{"grouped_gemm", scaled_gemm}};
const fp8flow_plugin_table table = {FP8FLOW_PLUGIN_VERSION, "scaled epilogue", 1, operations};

}  // namespace
}  // namespace fp8flow::hopper::gemm

const fp8flow_plugin_table* fp8flow_plugin(void) { return &fp8flow::hopper::gemm::table; }
