// Weights to both FP8 copies in 128x128 blocks from one read, alone or as the end of an AdamW step. Contract: kernels/ops/quantize.h and
// optimizer.h. Weights of other shapes: quantize_tiles.cu.
#include "kernels/hopper/weight_tiles.h"

#include "kernels/hopper/adamw.h"

namespace fp8flow::hopper {

namespace {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCtas = 2;
constexpr int kRows = 4;  // of a thread, 8 columns of each
constexpr int kPiece = 16, kPieces = kTile / kPiece;
constexpr int kColumnWords = kTile / 4;

struct CopyTiles {
    uint8_t* codes;  // null: no such copy
    float* scales;
    int64_t scale_batch_stride;
    int scale_stride;
};

struct WeightJob {
    RowView src;
    AdamWArgs step;
    CopyTiles fprop, dgrad;
    int tiles, row_tiles, col_tiles;
    QuantizeRule rule;
};

struct Place {
    int batch, row_tile, col_tile;
};
__device__ __forceinline__ Place place_of(const WeightJob& job, int tile) {
    const int row = tile / job.col_tiles;
    return {row / job.row_tiles, row % job.row_tiles, tile % job.col_tiles};
}

// The step of four parameters: the new masters.
__device__ __forceinline__ float4 step_four(const AdamWArgs& step, float grad_scale, int64_t at) {
    const float4 grad = *reinterpret_cast<const float4*>(step.grad + at);
    float4 master = *reinterpret_cast<const float4*>(step.master + at),
           m = *reinterpret_cast<const float4*>(step.m + at),
           v = *reinterpret_cast<const float4*>(step.v + at);
    const Element x = updated(step, grad_scale, grad.x, {master.x, m.x, v.x});
    const Element y = updated(step, grad_scale, grad.y, {master.y, m.y, v.y});
    const Element z = updated(step, grad_scale, grad.z, {master.z, m.z, v.z});
    const Element w = updated(step, grad_scale, grad.w, {master.w, m.w, v.w});
    master = float4{x.master, y.master, z.master, w.master};
    *reinterpret_cast<float4*>(step.master + at) = master;
    *reinterpret_cast<float4*>(step.m + at) = float4{x.m, y.m, z.m, w.m};
    *reinterpret_cast<float4*>(step.v + at) = float4{x.v, y.v, z.v, w.v};
    if (step.copy != nullptr && step.copy_dtype == DType::f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(step.copy) + at) = master;
    } else if (step.copy != nullptr) {
        const uint32_t low = to_bf16(master.x).bits | static_cast<uint32_t>(to_bf16(master.y).bits) << 16,
                       high = to_bf16(master.z).bits | static_cast<uint32_t>(to_bf16(master.w).bits) << 16;
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(step.copy) + at) = uint2{low, high};
    }
    return master;
}

// The word of rows 4 * quad .. 4 * quad + 3 of a column of the turned tile; pieces of 16 rows change places by the columns of a thread.
__device__ __forceinline__ int turned_index(int col, int piece) {
    return col * kColumnWords + (piece ^ col / kUnit % kPieces) * (kPiece / 4);
}

// Moves 4 bytes a weight in and two codes out: 5.64 GB, 1.38 ms at 32 x 4096 x 7168 and 4.1 TB/s. With the step, 16 in and 14 out, and 2
// for the BF16 copy (apart: 28 and 2, then 6): 7.05 GB, 1.72 ms at 8 x 4096 x 7168.
// A CTA walks over tiles, grid-stride, columns fastest; a thread has 4 rows x 8 columns in registers. Without the step the values of the
// next tile are requested as soon as these have become codes. Barrier 1: the maxima of the warps are in shared memory, and the tile before
// has left it. Barrier 2: the turned tile is complete, and leaves in 16-byte pieces. Element-wise but for maxima: deterministic; operations
// round as in the reference, since nothing is contracted. A step with *status != 0 writes no parameter, only the copies of those there are.
template <DType kCodes, bool kStep>
__global__ void __launch_bounds__(kThreads, kCtas) weight_tiles_kernel(const WeightJob job) {
    __shared__ uint4 warp_max[kWarps / 4];
    __shared__ uint4 turned_pieces[kTile * kPieces];
    uint32_t* const turned = reinterpret_cast<uint32_t*>(turned_pieces);
    const int thread = static_cast<int>(threadIdx.x), quad = thread / kBlockThreads,
              part = thread % kBlockThreads;
    const int rows = job.row_tiles * kTile, cols = job.col_tiles * kTile;
    float grad_scale = 0.0f;
    bool steps = false;
    if constexpr (kStep) {
        steps = job.step.status == nullptr || *job.step.status == 0;
        grad_scale = *job.step.grad_scale;
    }
    const auto first_row = [&](const Place& place) {
        return static_cast<int64_t>(place.batch) * rows + place.row_tile * kTile + quad * kRows;
    };
    float v[kRows][kUnit];
    const auto fetch = [&](const Place& place) {
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            load_unit(job.src, first_row(place) + k, place.col_tile * kTile + part * kUnit, v[k]);
    };
    if (!kStep && blockIdx.x < job.tiles) fetch(place_of(job, static_cast<int>(blockIdx.x)));
    for (int tile = static_cast<int>(blockIdx.x); tile < job.tiles; tile += static_cast<int>(gridDim.x)) {
        const Place place = place_of(job, tile);
        const int64_t at = first_row(place) * cols + place.col_tile * kTile + part * kUnit;
        if constexpr (kStep) {
#pragma unroll
            for (int i = 0; i < 2 * kRows; ++i) {
                const int64_t four = at + static_cast<int64_t>(i / 2) * cols + i % 2 * 4;
                const float4 now = steps ? step_four(job.step, grad_scale, four)
                                         : *reinterpret_cast<const float4*>(job.step.master + four);
                float* to = v[i / 2] + i % 2 * 4;
                to[0] = now.x, to[1] = now.y, to[2] = now.z, to[3] = now.w;
            }
        }
        uint32_t amax = 0;
#pragma unroll
        for (int k = 0; k < kRows; ++k) amax = max(amax, unit_magnitude(v[k]));
        amax = __reduce_max_sync(0xFFFFFFFFu, amax);
        if (thread % 32 == 0) reinterpret_cast<uint32_t*>(warp_max)[thread / 32] = amax;
        __syncthreads();
        amax = 0;
#pragma unroll
        for (int i = 0; i < kWarps / 4; ++i) {
            const uint4 four = warp_max[i];
            amax = max(amax, max(max(four.x, four.y), max(four.z, four.w)));
        }
        const BlockScale scale = block_scale(amax, kCodes, false, job.rule);
        const float multiplier = scale.multiplier;
        if (job.fprop.codes != nullptr) {
            if (thread == 0)
                job.fprop
                    .scales[place.batch * job.fprop.scale_batch_stride +
                            static_cast<int64_t>(place.row_tile) * job.fprop.scale_stride + place.col_tile] =
                    scale.dequant;
#pragma unroll
            for (int k = 0; k < kRows; ++k)
                *reinterpret_cast<uint2*>(job.fprop.codes + at + static_cast<int64_t>(k) * cols) =
                    encode_unit(v[k], multiplier, kCodes);
        }
        if (job.dgrad.codes != nullptr) {
            if (thread == 0)
                job.dgrad
                    .scales[place.batch * job.dgrad.scale_batch_stride +
                            static_cast<int64_t>(place.col_tile) * job.dgrad.scale_stride + place.row_tile] =
                    scale.dequant;
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                turned[turned_index(part * kUnit + i, quad / 4) + quad % 4] =
                    pack_fp8(v[0][i] * multiplier, v[1][i] * multiplier, v[2][i] * multiplier,
                             v[3][i] * multiplier, kCodes);
        }
        if (!kStep && tile + static_cast<int>(gridDim.x) < job.tiles)
            fetch(place_of(job, tile + static_cast<int>(gridDim.x)));
        __syncthreads();
        if (job.dgrad.codes == nullptr) continue;
        const int piece = thread % kPieces;
        int col = thread / kPieces;
        uint8_t* out = job.dgrad.codes +
                       (static_cast<int64_t>(place.batch) * cols + place.col_tile * kTile + col) * rows +
                       place.row_tile * kTile + piece * kPiece;
#pragma unroll
        for (int i = 0; i < kTile * kPieces / kThreads; ++i, col += kThreads / kPieces) {
            *reinterpret_cast<uint4*>(out) =
                *reinterpret_cast<const uint4*>(turned + turned_index(col, piece));
            out += static_cast<int64_t>(kThreads / kPieces) * rows;
        }
    }
}

CopyTiles copy_tiles(const Fp8Tensor& copy) {
    if (!copy) return {};
    return {.codes = static_cast<uint8_t*>(copy.codes.data),
            .scales = copy.scales.as<float>(),
            .scale_batch_stride = copy.scales.rank == 3 ? copy.scales.dim(1) * copy.scales.dim(2) : 0,
            .scale_stride = static_cast<int>(copy.scales.cols())};
}

template <bool kStep> void launch(const WeightJob& job, DType codes, const Launch& launch) {
    const auto kernel = codes == DType::e5m2 ? weight_tiles_kernel<DType::e5m2, kStep>
                                             : weight_tiles_kernel<DType::e4m3, kStep>;
    kernel<<<grid_for(job.tiles, launch, kCtas), kThreads, 0, stream_of(launch)>>>(job);
    check_launch("weight_tiles");
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kPiece == 0; }

}  // namespace

void clear_scales(const Fp8Tensor& copy, const Launch& launch) {
    if (copy)
        check_cuda(cudaMemsetAsync(copy.scales.data, 0, static_cast<std::size_t>(copy.scales.bytes()),
                                   stream_of(launch)),
                   "clearing scales");
}

bool launch_weight_tiles(const TensorView& src, const op::AdamW* step, const QuantizeRule& rule,
                         const Fp8Tensor& fprop, const Fp8Tensor& dgrad, const Launch& launch_args) {
    const int64_t rows = src.dim(-2), cols = src.dim(-1), batches = src.rank == 3 ? src.dim(0) : 1;
    const int64_t tiles = batches * (rows / kTile) * (cols / kTile);
    if (tiles == 0 || tiles > INT32_MAX / 2 || rows % kTile != 0 || cols % kTile != 0) return false;
    if ((!fprop && !dgrad) || (fprop && dgrad && fprop.codes.dtype != dgrad.codes.dtype)) return false;
    for (const Fp8Tensor* copy : {&fprop, &dgrad})
        if (*copy && (copy->layout != ScaleLayout::block128 || !is_aligned(copy->codes.data))) return false;
    WeightJob job = {.src = row_view(src),
                     .step = {},
                     .fprop = copy_tiles(fprop),
                     .dgrad = copy_tiles(dgrad),
                     .tiles = static_cast<int>(tiles),
                     .row_tiles = static_cast<int>(rows / kTile),
                     .col_tiles = static_cast<int>(cols / kTile),
                     .rule = rule};
    if (!job.src.vector) return false;
    if (step != nullptr) {
        for (const TensorView* view : {&step->grad, &step->master, &step->m, &step->v, &step->copy})
            if (!is_aligned(view->data)) return false;
        job.step = adamw_args(*step);
    }
    clear_scales(fprop, launch_args);
    clear_scales(dgrad, launch_args);
    const DType codes = fprop ? fprop.codes.dtype : dgrad.codes.dtype;
    if (step != nullptr)
        launch<true>(job, codes, launch_args);
    else
        launch<false>(job, codes, launch_args);
    return true;
}

}  // namespace fp8flow::hopper
