// Cross-entropy on the GPU: loss and gradient of a row of logits that is read once. Bit-equal to the reference. Labels cannot be reported from
// a kernel: the data loader checks them; here one outside the vocabulary becomes NaN (a step that is then skipped), never an address.
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/sigmoid.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/vector_io.h"

#include <cooperative_groups.h>

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32, kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kBlockColumns = static_cast<int>(op::kLossBlock);  // a warp sums a block, four columns a thread
static_assert(kBlockColumns == 4 * kWarpSize);
constexpr float kFarBelow = 55.0f;  // exp(-55) is above 2^-80
constexpr uint32_t kNanBits = 0x7FC00000u, kMinusInfinityBits = 0xFF800000u;

struct CrossEntropyArgs {
    const float* logits;
    const int32_t* labels;
    float* loss;
    void* dlogits;
    DType dlogits_dtype;
    int64_t tokens, columns, vocab;
    float grad_scale;
};

__device__ __forceinline__ float warp_largest(float largest) {
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, largest, mask);
        largest = other > largest ? other : largest;
    }
    return largest;
}
// Sum of a block whose columns 4 l .. 4 l + 3 thread l holds; every thread of the warp gets it.
__device__ __forceinline__ float block_sum(const float (&e)[4]) {
    float sum = (e[0] + e[1]) + (e[2] + e[3]);
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    return sum;
}
// exp_float(x) of x <= 0: the short form covers all but what is next to nothing, and NaN.
__device__ __forceinline__ float exp_of_difference(float x) {
    return x >= -kNear ? exp_near(x) : exp_float(x);
}
// e / sum, correctly rounded where e is 0 or far enough above the least normal number for exact remainders. The reciprocal in two parts
// gives the quotient to within little more than half a unit of its last place; one step by its exact remainder and the correctly
// rounded reciprocal then gives the nearest number (Markstein).
struct Divisor {
    float value, reciprocal, rest;
};
__device__ __forceinline__ Divisor divisor(float sum) {
    const float reciprocal = __frcp_rn(sum);
    return {sum, reciprocal, fma_float(-reciprocal, sum, 1.0f) * reciprocal};
}
__device__ __forceinline__ float divide_far(float e, const Divisor& by) {
    const float q = fma_float(e, by.reciprocal, e * by.rest);
    return fma_float(fma_float(-q, by.value, e), by.reciprocal, q);
}
__device__ __forceinline__ float divide(float e, const Divisor& by) {
    constexpr uint32_t kFarBits = 0x17800000u;  // 2^-80
    return float_bits(e) - 1u < kFarBits - 1u ? div_float(e, by.value) : divide_far(e, by);
}

// ---- rows in 16-byte words -----------------------------------------------------------------------------------------------------------
namespace cg = cooperative_groups;
constexpr int kClusterCtas = 8;
constexpr int kGroupBlocks = 4, kGroupColumns = kGroupBlocks * kBlockColumns;  // what a warp takes at a time
constexpr int64_t kResidentClusters = 48;                                      // about: three CTAs an SM
constexpr int64_t kSharedLimit = (227 << 10) - 1024;  // of a CTA, less its static part

struct Slices {
    int columns;  // of a CTA, a multiple of kBlockColumns
    int blocks;   // of the vocabulary
    int64_t bytes() const { return (int64_t{columns} + blocks) * static_cast<int64_t>(sizeof(float)); }
};

// Four columns of each block of a group, lane by lane: the place of (block b, lane) in the slice.
__device__ __forceinline__ int place_of(int group, int b) {
    return group * kGroupColumns + b * kBlockColumns + static_cast<int>(threadIdx.x) % kWarpSize * 4;
}
// block_sum of four blocks: eight lanes get that of block lane / 8. The first two steps halve what is left to add.
__device__ __forceinline__ float group_sums(const float (&quads)[kGroupBlocks]) {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    const bool upper = threadIdx.x & 16, second = threadIdx.x & 8;
    const float even = (upper ? quads[2] : quads[0]) + __shfl_xor_sync(kAll, upper ? quads[0] : quads[2], 16);
    const float odd = (upper ? quads[3] : quads[1]) + __shfl_xor_sync(kAll, upper ? quads[1] : quads[3], 16);
    float sum = (second ? odd : even) + __shfl_xor_sync(kAll, second ? even : odd, 8);
    for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
    return sum;
}
__device__ __forceinline__ void store4(const CrossEntropyArgs& args, int64_t at, const float (&p)[4]) {
    if (args.dlogits_dtype == DType::bf16) {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.dlogits) + at) =
            uint2{pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3])};
    } else if (args.dlogits_dtype == DType::f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(args.dlogits) + at) = float4{p[0], p[1], p[2], p[3]};
    } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) store_float(args.dlogits, args.dlogits_dtype, at + n, p[n]);
    }
}

// Moves: logits once, dlogits once (V=129280, bf16: 776 KB a token, 190 us for 1024 tokens), and nothing twice, because a row stays on the
// chip: a cluster of eight CTAs holds it in shared memory (65 KB a CTA; three CTAs an SM, so that one loads while others compute). The
// clusters start in the order of their tokens; each asks, before it loads its own row, for that of the cluster which will follow it
// into L2 (25 MB for all): memory works through all phases, and the loads wait for L2 only. A row: (1) logits to shared memory and
// the largest of the CTA; (2) exponentials in place, and sums of blocks of 128 columns, which go to every CTA of the cluster;
// (3) eight threads of each CTA add the block sums (1010) in lanes; (4) the gradient. A warp takes four blocks at a time, a thread
// the same columns in all phases, and notes how far they are below the largest, so that whole groups take no element's special case: about
// 32 instructions an element, of which exp has 13 and the division 4: 135 us of issue (62 and 260 us before, more than memory needs).
// Barriers: of the cluster after (1), so that all largest are there, and after (2), so that all block sums are there; they also keep a
// CTA from writing what others still read (largest, block sums) of the row before, and from leaving while others write to it: nobody
// touches another CTA after the second. Of the CTA inside (1) and after (3). All CTAs of a cluster take the same rows and branches.
// Fixed order: deterministic.
__global__ __cluster_dims__(kClusterCtas, 1, 1)
    __launch_bounds__(kThreads, 3) void row_cluster_kernel(const CrossEntropyArgs args, const Slices slices) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float of_warps[kWarps];
    __shared__ float of_cta;  // the largest of this CTA's slice
    __shared__ float row_sum;
    float* const slice = shared;                        // [slices.columns]
    float* const block_sums = shared + slices.columns;  // [slices.blocks], of the whole row
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = static_cast<int>(cluster.block_rank());
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
    const int first = rank * slices.columns;
    // columns of this slice that are in the row, and in the vocabulary; 0 or less: none
    const int columns = min(static_cast<int>(args.columns) - first, slices.columns),
              known = min(static_cast<int>(args.vocab) - first, slices.columns);
    const int64_t clusters = gridDim.x / kClusterCtas, ahead = min(clusters, kResidentClusters);
    // where this lane's block sums of group 0 go: to CTA lane % 8, block lane / 8
    float* const sums_there = cluster.map_shared_rank(block_sums, lane % kClusterCtas) +
                              first / kBlockColumns + lane / kClusterCtas;
    for (int64_t t = blockIdx.x / kClusterCtas; t < args.tokens; t += clusters) {
        const float* const row = args.logits + t * args.columns + first;
        const int64_t out = t * args.columns + first;
        const int64_t label = args.labels[t];
        if (thread == 0 && columns > 0 && t + ahead < args.tokens && args.labels[t + ahead] >= 0)
            bulk_prefetch(row + ahead * args.columns, static_cast<uint32_t>(columns * sizeof(float)));
        if (label < 0) {  // ignored; the same branch for the cluster
            if (rank == 0 && thread == 0) args.loss[t] = 0.0f;
            if (args.dlogits != nullptr) {
                const float zeros[kVector] = {};
                for (int i = thread * kVector; i < columns; i += kThreads * kVector)
                    store8(args.dlogits, args.dlogits_dtype, out + i, zeros);
            }
            continue;
        }

        float largest = bits_float(kMinusInfinityBits);
        int group = warp;
        for (; (group + kWarps + 1) * kGroupColumns <= known; group += 2 * kWarps) {
            float4 words[2][kGroupBlocks];
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b)
                    words[j][b] =
                        __ldcs(reinterpret_cast<const float4*>(row + place_of(group + j * kWarps, b)));
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b) {
                    const float4 word = words[j][b];
                    *reinterpret_cast<float4*>(slice + place_of(group + j * kWarps, b)) = word;
                    largest = fmaxf(fmaxf(largest, fmaxf(word.x, word.y)), fmaxf(word.z, word.w));
                }
        }
        for (; group * kGroupColumns < columns; group += kWarps) {
            float4 words[kGroupBlocks];
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b)
                if (place_of(group, b) < columns)
                    words[b] = __ldcs(reinterpret_cast<const float4*>(row + place_of(group, b)));
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
                const int i = place_of(group, b);
                if (i >= columns) continue;
                *reinterpret_cast<float4*>(slice + i) = words[b];
                const float v[4] = {words[b].x, words[b].y, words[b].z, words[b].w};
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (i + n < known) largest = fmaxf(largest, v[n]);
            }
        }
        largest = warp_largest(largest);
        if (lane == 0) of_warps[warp] = largest;
        __syncthreads();
        if (warp == 0) {
            largest = warp_largest(of_warps[lane % kWarps]);
            if (lane == 0) of_cta = largest;
        }
        cluster.sync();
        largest = warp_largest(*cluster.map_shared_rank(&of_cta, lane % kClusterCtas));

        uint32_t farthest = 0;  // the bits of the largest difference in whole groups; NaN is above all
        for (group = warp; (group + 1) * kGroupColumns <= known; group += kWarps) {
            float below[kGroupBlocks][4], e[kGroupBlocks][4], quads[kGroupBlocks];
            uint32_t far_here = 0;
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
                const float4 word = *reinterpret_cast<const float4*>(slice + place_of(group, b));
                below[b][0] = largest - word.x;
                below[b][1] = largest - word.y;
                below[b][2] = largest - word.z;
                below[b][3] = largest - word.w;
#pragma unroll
                for (int n = 0; n < 4; ++n) far_here = max(far_here, float_bits(below[b][n]));
            }
            farthest = max(farthest, far_here);
            if (far_here <= float_bits(kNear)) {
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b)
#pragma unroll
                    for (int n = 0; n < 4; ++n) e[b][n] = exp_near(-below[b][n]);
            } else {
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b)
#pragma unroll 1
                    for (int n = 0; n < 4; ++n) {
                        e[b][0] = exp_float(-below[b][0]);
                        rotate(below[b]);
                        rotate(e[b]);
                    }
            }
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
                *reinterpret_cast<float4*>(slice + place_of(group, b)) =
                    float4{e[b][0], e[b][1], e[b][2], e[b][3]};
                quads[b] = (e[b][0] + e[b][1]) + (e[b][2] + e[b][3]);
            }
            sums_there[group * kGroupBlocks] = group_sums(quads);
        }
        for (; group * kGroupColumns < known; group += kWarps) {  // the last one, if it is not whole
            float quads[kGroupBlocks];
#pragma unroll 1
            for (int b = 0; b < kGroupBlocks; ++b) {
                const int i = place_of(group, b);
                float e[4] = {};
                if (i < columns) {
                    float4* const place = reinterpret_cast<float4*>(slice + i);
                    const float4 word = *place;
                    const float v[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        e[n] = i + n < known ? exp_of_difference(v[n] - largest) : 0.0f;
                    *place = float4{e[0], e[1], e[2], e[3]};
                }
                quads[0] = (e[0] + e[1]) + (e[2] + e[3]);
                rotate(quads);
            }
            const float sum = group_sums(quads);
            if ((group * kGroupBlocks + lane / kClusterCtas) * kBlockColumns < known)
                sums_there[group * kGroupBlocks] = sum;
        }
        cluster.sync();

        if (warp == 0) {
            float sum = 0.0f;
#pragma unroll 16
            for (int i = lane % kLaneCount; i < slices.blocks; i += kLaneCount) sum += block_sums[i];
            sum = combine_lanes(sum);
            if (lane == 0) {
                const bool in_vocabulary = label < args.vocab;
                row_sum = in_vocabulary ? sum : bits_float(kNanBits);
                if (rank == 0)
                    args.loss[t] = in_vocabulary
                                       ? log_float(sum) + (largest - args.logits[t * args.columns + label])
                                       : bits_float(kNanBits);
            }
        }
        __syncthreads();
        if (args.dlogits == nullptr) continue;
        const Divisor sum = divisor(row_sum);
        const int own_label = static_cast<int>(min(label - first, static_cast<int64_t>(slices.columns)));
        const bool far = farthest <= float_bits(kFarBelow);
        for (group = warp; (group + 1) * kGroupColumns <= known; group += kWarps) {
            float p[kGroupBlocks][4];
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
                const float4 word = *reinterpret_cast<const float4*>(slice + place_of(group, b));
                p[b][0] = word.x, p[b][1] = word.y, p[b][2] = word.z, p[b][3] = word.w;
            }
            if (far) {
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b)
#pragma unroll
                    for (int n = 0; n < 4; ++n) p[b][n] = divide_far(p[b][n], sum);
            } else {
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b)
#pragma unroll 1
                    for (int n = 0; n < 4; ++n) {
                        p[b][0] = divide(p[b][0], sum);
                        rotate(p[b]);
                    }
            }
            if (own_label / kGroupColumns == group) {
#pragma unroll
                for (int b = 0; b < kGroupBlocks; ++b)
#pragma unroll
                    for (int n = 0; n < 4; ++n)
                        if (own_label == place_of(group, b) + n) p[b][n] -= 1.0f;
            }
#pragma unroll
            for (int b = 0; b < kGroupBlocks; ++b) {
#pragma unroll
                for (int n = 0; n < 4; ++n) p[b][n] *= args.grad_scale;
                store4(args, out + place_of(group, b), p[b]);
            }
        }
        for (; group * kGroupColumns < columns; group += kWarps) {
#pragma unroll 1
            for (int b = 0; b < kGroupBlocks; ++b) {
                const int i = place_of(group, b);
                if (i >= columns) break;
                const float4 word = *reinterpret_cast<const float4*>(slice + i);
                const float e[4] = {word.x, word.y, word.z, word.w};
                float p[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    p[n] = divide(e[n], sum);
                    if (own_label == i + n) p[n] -= 1.0f;
                    p[n] = i + n < known ? p[n] * args.grad_scale : 0.0f;
                }
                store4(args, out + i, p);
            }
        }
    }
}

// ---- any row -------------------------------------------------------------------------------------------------------------------------
// Moves: a row of logits three times, a row of gradients once. One CTA a token: the largest logit; block sums of the exponentials, two a
// warp and turn; the gradient from recomputed exponentials. Barriers stand around every use of shared memory and all threads reach
// them: loop bounds depend on the token only. Fixed order: deterministic.
constexpr int kTurnBlocks = 2 * kWarps;
static_assert(kTurnBlocks % kLaneCount == 0);
__global__ __launch_bounds__(kThreads) void row_kernel(const CrossEntropyArgs args) {
    __shared__ float of_warps[kWarps], block_sums[kTurnBlocks], row_sum;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize, warp = thread / kWarpSize;
    for (int64_t t = blockIdx.x; t < args.tokens; t += gridDim.x) {
        const float* row = args.logits + t * args.columns;
        const int64_t label = args.labels[t];
        if (label < 0) {  // ignored; the same branch for all threads
            if (thread == 0) args.loss[t] = 0.0f;
            if (args.dlogits != nullptr)
                for (int64_t i = thread; i < args.columns; i += kThreads)
                    store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, 0.0f);
            continue;
        }
        float largest = bits_float(kMinusInfinityBits);
        for (int64_t i = thread; i < args.vocab; i += kThreads) largest = row[i] > largest ? row[i] : largest;
        largest = warp_largest(largest);
        if (lane == 0) of_warps[warp] = largest;
        __syncthreads();
        largest = warp_largest(of_warps[lane % kWarps]);

        float sum = 0.0f;  // a lane of the sum, in the threads of the first warp
        for (int64_t start = 0; start < args.vocab; start += kTurnBlocks * kBlockColumns) {
            for (int block = warp; block < kTurnBlocks; block += kWarps) {
                const int64_t i = start + block * kBlockColumns + lane * 4;
                float e[4];
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    e[n] = i + n < args.vocab ? exp_float(row[i + n] - largest) : 0.0f;
                const float of_block = block_sum(e);
                if (lane == 0) block_sums[block] = of_block;
            }
            __syncthreads();
            if (warp == 0)
                for (int block = lane % kLaneCount; block < kTurnBlocks; block += kLaneCount)
                    sum += block_sums[block];
            __syncthreads();
        }
        if (warp == 0) {
            sum = combine_lanes(sum);
            if (lane == 0) {
                const bool in_vocabulary = label < args.vocab;
                row_sum = in_vocabulary ? sum : bits_float(kNanBits);
                args.loss[t] = in_vocabulary ? log_float(sum) + (largest - row[label]) : bits_float(kNanBits);
            }
        }
        __syncthreads();
        if (args.dlogits != nullptr) {
            for (int64_t i = thread; i < args.columns; i += kThreads) {
                float p = 0.0f;
                if (i < args.vocab) {
                    p = div_float(exp_float(row[i] - largest), row_sum);
                    if (i == label) p -= 1.0f;
                    p *= args.grad_scale;
                }
                store_float(args.dlogits, args.dlogits_dtype, t * args.columns + i, p);
            }
        }
        __syncthreads();  // of_warps and row_sum belong to the next token now
    }
}

}  // namespace

void HopperOps::do_cross_entropy(const op::CrossEntropy& args, const Launch& launch) {
    const CrossEntropyArgs kernel_args{.logits = args.logits.as<float>(),
                                       .labels = args.labels.as<int32_t>(),
                                       .loss = args.loss.as<float>(),
                                       .dlogits = args.dlogits ? args.dlogits.data : nullptr,
                                       .dlogits_dtype = args.dlogits.dtype,
                                       .tokens = args.logits.dim(0),
                                       .columns = args.logits.dim(1),
                                       .vocab = args.vocab_size,
                                       .grad_scale = args.grad_scale};
    if (kernel_args.tokens == 0) return;
    const int64_t columns = kernel_args.columns;
    constexpr int64_t kLongestRow = kClusterCtas * (kSharedLimit / static_cast<int64_t>(sizeof(float)));
    const bool in_words = columns <= kLongestRow && is_vectorisable(args.logits.data, columns) &&
                          (!args.dlogits || is_vectorisable(args.dlogits.data, columns));
    const Slices slices =
        in_words
            ? Slices{.columns = static_cast<int>(round_up(ceil_div(columns, kClusterCtas), op::kLossBlock)),
                     .blocks = static_cast<int>(ceil_div(args.vocab_size, op::kLossBlock))}
            : Slices{};
    if (in_words && slices.bytes() <= kSharedLimit) {
        check_cuda(cudaFuncSetAttribute(row_cluster_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(slices.bytes())),
                   "cross_entropy");
        // A cluster a token, placed as SMs get free: not all GPCs hold the same number of clusters.
        const int64_t clusters =
            launch.sm_limit > 0
                ? std::min<int64_t>(kernel_args.tokens, ceil_div(launch.sm_limit, kClusterCtas))
                : std::min(kernel_args.tokens, int64_t{1} << 24);
        row_cluster_kernel<<<static_cast<unsigned>(clusters * kClusterCtas), kThreads,
                             static_cast<std::size_t>(slices.bytes()), stream_of(launch)>>>(kernel_args,
                                                                                            slices);
    } else {
        row_kernel<<<grid_for(kernel_args.tokens, launch), kThreads, 0, stream_of(launch)>>>(kernel_args);
    }
    check_launch("cross_entropy");
}

}  // namespace fp8flow
