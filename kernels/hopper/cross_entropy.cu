// Cross-entropy on the GPU: loss and gradient of a row of logits that is read once. Bit-equal to the reference. Labels cannot be reported from
// a kernel: the data loader checks them; here one outside the vocabulary becomes NaN (a step that is then skipped), never an address.
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/vector_io.h"

#include <cooperative_groups.h>

namespace fp8flow {

using namespace hopper;

namespace {

constexpr int kWarpSize = 32, kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kBlockColumns = static_cast<int>(op::kLossBlock);  // a warp sums a block, four columns a thread
static_assert(kBlockColumns == 4 * kWarpSize);
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
// e / sum, correctly rounded (Markstein: the quotient corrected twice by its exact remainder, with the rounded reciprocal), where e is 0 or
// far enough above the least normal number for exact remainders.
__device__ __forceinline__ float divide(float e, float sum, float reciprocal) {
    constexpr uint32_t kFarBits = 0x17800000u;  // 2^-80
    if (float_bits(e) - 1u < kFarBits - 1u) return div_float(e, sum);
    float q = e * reciprocal;
    q = fma_float(fma_float(-q, sum, e), reciprocal, q);
    return fma_float(fma_float(-q, sum, e), reciprocal, q);
}

// ---- rows in 16-byte words -----------------------------------------------------------------------------------------------------------
namespace cg = cooperative_groups;
constexpr int kClusterCtas = 8;
constexpr int kInFlight = 8;                          // 16-byte loads of a thread
constexpr int64_t kSharedLimit = (227 << 10) - 1024;  // of a CTA, less its static part

struct Slices {
    int columns;  // of a CTA, a multiple of kBlockColumns
    int blocks;   // of the vocabulary
    int64_t bytes() const { return (int64_t{columns} + blocks) * static_cast<int64_t>(sizeof(float)); }
};

// Moves: logits once, dlogits once (V=129280, bf16: 776 KB a token, 190 us for 1024 tokens), and nothing twice, because a row stays on the
// chip: a cluster of eight CTAs holds it in shared memory (65 KB a CTA; three CTAs an SM, so that one loads while others compute; eight
// 16-byte loads a thread: 96 KB on their way an SM). About 45 instructions an element, of which exp has 14 and the division 5: 200 us at
// full issue. A row: (1) logits to shared memory and the largest of the CTA; (2) exponentials in place, a block of 128 columns a warp, whose
// sum goes to every CTA of the cluster; (3) eight threads of each CTA add the block sums (1010) in lanes; (4) the gradient. Barriers: of
// the cluster after (1), so that all largest are there, and after (2), so that all block sums are there; it also keeps a CTA from the next
// row while others read its largest, and from leaving while others write to it: nobody touches another CTA after it. Of the CTA inside
// (1) and after (3). All CTAs of a cluster take the same rows and branches. Fixed order: deterministic.
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
    const int64_t clusters = gridDim.x / kClusterCtas;
    for (int64_t t = blockIdx.x / kClusterCtas; t < args.tokens; t += clusters) {
        const float* const row = args.logits + t * args.columns + first;
        const int64_t out = t * args.columns + first;
        const int64_t label = args.labels[t];
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
        for (int start = thread * 4; start < columns; start += kInFlight * kThreads * 4) {
            float4 words[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                const int i = start + j * kThreads * 4;
                if (i < columns) words[j] = __ldcs(reinterpret_cast<const float4*>(row + i));
            }
#pragma unroll
            for (int j = 0; j < kInFlight; ++j) {
                const int i = start + j * kThreads * 4;
                if (i >= columns) continue;
                *reinterpret_cast<float4*>(slice + i) = words[j];
                const float v[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (i + n < known) largest = v[n] > largest ? v[n] : largest;
            }
        }
        largest = warp_largest(largest);
        if (lane == 0) of_warps[warp] = largest;
        __syncthreads();  // also: the slice is written
        if (warp == 0) {
            largest = warp_largest(of_warps[lane % kWarps]);
            if (lane == 0) of_cta = largest;
        }
        cluster.sync();
        largest = warp_largest(*cluster.map_shared_rank(&of_cta, lane % kClusterCtas));

        for (int block = warp; block * kBlockColumns < known; block += kWarps) {
            const int i = block * kBlockColumns + lane * 4;
            float e[4] = {};
            if (i < columns) {
                float4* const place = reinterpret_cast<float4*>(slice + i);
                const float4 word = *place;
                const float v[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
                for (int n = 0; n < 4; ++n) e[n] = i + n < known ? exp_of_difference(v[n] - largest) : 0.0f;
                *place = float4{e[0], e[1], e[2], e[3]};
            }
            const float sum = block_sum(e);
            if (lane < kClusterCtas)
                cluster.map_shared_rank(block_sums, lane)[first / kBlockColumns + block] = sum;
        }
        cluster.sync();  // also: the exponentials are written

        if (warp == 0) {
            float sum = 0.0f;
#pragma unroll 8
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
        const float sum = row_sum, reciprocal = __frcp_rn(sum);
        const int64_t own_label = label - first;
        for (int i = thread * kVector; i < columns; i += kThreads * kVector) {
            const float4 low = *reinterpret_cast<const float4*>(slice + i),
                         high = *reinterpret_cast<const float4*>(slice + i + 4);
            const float e[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            float p[kVector];
#pragma unroll
            for (int n = 0; n < kVector; ++n) p[n] = divide(e[n], sum, reciprocal);
            if (own_label >= i && own_label < i + kVector) {
#pragma unroll
                for (int n = 0; n < kVector; ++n)
                    if (own_label == i + n) p[n] -= 1.0f;
            }
#pragma unroll
            for (int n = 0; n < kVector; ++n) p[n] = i + n < known ? p[n] * args.grad_scale : 0.0f;
            if (args.dlogits_dtype == DType::bf16)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args.dlogits) + out + i) =
                    uint4{pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]),
                          pack_bf16(p[6], p[7])};
            else
                store8(args.dlogits, args.dlogits_dtype, out + i, p);
        }
        __syncthreads();  // the slice belongs to the next row now
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
