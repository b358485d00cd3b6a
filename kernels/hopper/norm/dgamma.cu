// SPDX-License-Identifier: MIT
// The gradient of gamma over narrow rows of BF16: parts by CTAs, chunks by warps, the last CTA adds the
// parts.
#include "kernels/hopper/norm/dgamma.h"

#include "kernels/core/scalar_math.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/runtime/launch.h"

#include <cuda_runtime.h>

namespace fp8flow::hopper::norm {

namespace {

constexpr int kParts = static_cast<int>(op::kGammaParts), kGroup = static_cast<int>(op::kGammaGroup),
              kGroups = kParts / kGroup, kChunks = static_cast<int>(op::gamma_chunks(1));
constexpr int kMostPairs = 64;  // pairs of columns of a CTA
constexpr int kAhead = 16;      // rows of a chunk that are loaded together

struct GammaJobs {
    GammaJob job[kMostGammas];
    int width;
    Gradient mode;
    float* partials;  // [jobs, kParts, width]
    uint32_t* tickets;
};

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The sums of the parts of dgamma, then dgamma. Lower bound: dy and x read once; after the pass that made dx
// both are in L2 (T=4096, 16 heads of 64: 16.8 MB, 4 us at 4 TB/s).
// A CTA takes a part and up to kMostPairs pairs of columns; row y of its threads takes a chunk of the part,
// so that four chains of additions per column run in parallel, each with kAhead rows in flight. The last CTA
// of a job and column tile adds the parts: its rows of threads take three groups each. Barriers: the sums of
// the chunks are in shared memory; the ticket is known; the groups are summed. Deterministic: sums in the
// order of the contract; the ticket only says which CTA is the last.
__global__ void __launch_bounds__(kMostPairs* kChunks) narrow_gamma_kernel(const GammaJobs args) {
    __shared__ float2 sums[kGroups][kMostPairs];
    __shared__ bool is_last;
    pdl_begin(PdlOrder::after);
    // selected, because an index would put the jobs into local memory
    const GammaJob job = blockIdx.z == 0 ? args.job[0] : args.job[1];
    const int pair = static_cast<int>(threadIdx.x), chunk = static_cast<int>(threadIdx.y),
              part = static_cast<int>(blockIdx.x), pairs = args.width / 2,
              column = static_cast<int>(blockIdx.y * blockDim.x) + pair;
    float* const partials = args.partials + static_cast<int64_t>(blockIdx.z) * kParts * args.width;
    float2 sum = {0.0f, 0.0f};
    if (job.chunk_sums != nullptr) {
        const int64_t place = int64_t{chunk * kParts + part} * pairs + column;
        if (column < pairs) sum = reinterpret_cast<const float2*>(job.chunk_sums)[place];
    } else if (column < pairs) {
        constexpr int64_t kStep = int64_t{kChunks} * kParts;
        const auto* const dy = reinterpret_cast<const uint32_t*>(job.dy) + column;
        const auto* const x = reinterpret_cast<const uint32_t*>(job.x) + column;
        for (int64_t first = part + int64_t{chunk} * kParts; first < job.rows; first += kAhead * kStep) {
            uint32_t dys[kAhead], xs[kAhead];
            float rstd[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const int64_t row = first + i * kStep;
                if (row >= job.rows) continue;
                dys[i] = dy[row * pairs];
                xs[i] = x[row * pairs];
                rstd[i] = job.rstd[row];
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (first + i * kStep >= job.rows) continue;
                sum.x = fma_float(low_bf16(dys[i]), low_bf16(xs[i]) * rstd[i], sum.x);
                sum.y = fma_float(high_bf16(dys[i]), high_bf16(xs[i]) * rstd[i], sum.y);
            }
        }
    }
    sums[chunk][pair] = sum;
    __syncthreads();
    if (chunk == 0 && column < pairs) {
#pragma unroll
        for (int other = 1; other < kChunks; ++other) {
            sum.x += sums[other][pair].x;
            sum.y += sums[other][pair].y;
        }
        reinterpret_cast<float2*>(partials)[int64_t{part} * pairs + column] = sum;
    }
    __threadfence();
    __syncthreads();
    uint32_t* const ticket = args.tickets + blockIdx.z * gridDim.y + blockIdx.y;
    if (pair == 0 && chunk == 0) is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (column < pairs) {
        for (int group = chunk; group < kGroups; group += kChunks) {
            float2 of_group = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                const float2 one = __ldcg(reinterpret_cast<const float2*>(partials) +
                                          int64_t{group * kGroup + i} * pairs + column);
                of_group.x += one.x;
                of_group.y += one.y;
            }
            sums[group][pair] = of_group;
        }
    }
    __syncthreads();
    if (pair == 0 && chunk == 0) *ticket = 0;  // ready for the next call
    if (chunk != 0 || column >= pairs) return;
    float2 total = {0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        total.x += sums[group][pair].x;
        total.y += sums[group][pair].y;
    }
    float2* const out = reinterpret_cast<float2*>(job.dgamma) + column;
    const float2 before = args.mode == Gradient::accumulate ? *out : float2{0.0f, 0.0f};
    *out = args.mode == Gradient::accumulate ? float2{before.x + total.x, before.y + total.y} : total;
}

}  // namespace

bool sums_narrow_gamma(const GammaJob& job, int64_t width) {
    return width % 2 == 0 && width < kNarrowestWide && is_aligned(job.dy, 4) && is_aligned(job.x, 4) &&
           is_aligned(job.dgamma, 8);
}

int64_t gamma_partials(int64_t width, int64_t jobs) { return jobs * kParts * width; }
int64_t gamma_tickets(int64_t width, int64_t jobs) { return jobs * ceil_div(ceil_div(width, 2), 32); }

void launch_narrow_gamma(std::span<const GammaJob> jobs, int64_t width, Gradient mode, float* partials,
                         uint32_t* tickets, const Launch& launch) {
    GammaJobs args{
        .job = {}, .width = static_cast<int>(width), .mode = mode, .partials = partials, .tickets = tickets};
    std::copy(jobs.begin(), jobs.end(), args.job);
    const int64_t pairs = width / 2;
    const dim3 threads(static_cast<unsigned>(std::min<int64_t>(kMostPairs, round_up(pairs, 32))), kChunks);
    const dim3 grid(kParts, static_cast<unsigned>(ceil_div(pairs, threads.x)),
                    static_cast<unsigned>(jobs.size()));
    launch_pdl(narrow_gamma_kernel, grid, threads, 0, launch, "gradient of gamma", args);
}

}  // namespace fp8flow::hopper::norm
