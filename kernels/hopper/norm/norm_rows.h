// SPDX-License-Identifier: MIT
// What the RMSNorm kernels share: arguments, the order of a sum over a row, and the parts of the kernels for
// wide rows of BF16 or FP16.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/ops/norm.h"

namespace fp8flow::hopper::norm {

struct NormForward {
    RowView x, gamma, y;  // y optional
    int64_t rows;
    float eps, gamma_offset;
    float* rstd;
    RowView fp8;                          // optional
    RowScales scales;                     // data == nullptr: one scale for the tensor
    const float* tensor_scale = nullptr;  // layout tensor
    int32_t* amax = nullptr;              // optional: bits of a float that is not NaN
    QuantizeRule rule;
    int segments, segment_cols;  // of a row (kernels/ops/norm.h); 1: the whole row
};

struct NormBackward {
    RowView dy, x, gamma, dresidual, dx;  // dresidual optional
    int64_t rows;
    float gamma_offset;
    const float* rstd;
    int segments, segment_cols;
    int parts, chunks;  // of dgamma; chunks per part
    float* partials;    // [min(parts, rows), H]: the sums of the parts
    // front_backward.cu. issued: rows loaded by all CTAs (clusters); 0 before the call, and set to 0 by the
    // dgamma kernel. depth: slots of the ring. max_lead: a CTA loads no row that is more quarters of a row
    // ahead of the mean of all CTAs; negative: no limit.
    uint32_t* issued;
    int depth = 0;
    int max_lead = -1;
};

__device__ __forceinline__ void load_gamma(const RowView& gamma, float offset, int col, float (&g)[kUnit]) {
    load_unit(gamma, 0, col, g);
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

// The sum over a segment: thread t holds strand t (units t, t + 256, ...). A barrier separates the two
// functions; every thread gets the sum. `warp_sums` are eight words, 0 where the CTA has no such warp.
__device__ __forceinline__ void store_strand(float strand, float* warp_sums) {
    strand = warp_sum(strand);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = strand;
}
__device__ __forceinline__ float row_sum(const float* warp_sums) {
    return combine_lanes(warp_sums[threadIdx.x % 8]);
}

// One unit of the output: values before rounding (0 past the end of the row) to y, FP8 values, scales and the
// maximum.
__device__ __forceinline__ void write_unit(const NormForward& args, int64_t row, int col, float multiplier,
                                           float (&v)[kUnit], uint32_t& amax) {
    const int width = args.x.cols;
    if (args.amax != nullptr) amax = max(amax, unit_magnitude(v));
    if (args.y && col < width) store_unit(args.y, row, col, v);
    if (!args.fp8) return;
    if (args.scales.data == nullptr) {
        if (col < width) store_fp8(args.fp8, row, col, encode_unit(v, multiplier, args.fp8.dtype));
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {  // to BF16 and back
        const uint32_t pair = pack_bf16(v[i], v[i + 1]);
        v[i] = __uint_as_float(pair << 16);
        v[i + 1] = __uint_as_float(pair & 0xFFFF0000u);
    }
    quantize_unit(v, true, args.fp8, args.scales, row, col, args.rule);
}
// The maximum of the CTA into the global word: one atomic per CTA, since all address the same word.
// `largest`: shared, set to 0 before an earlier barrier; all threads call it. Magnitudes compare like their
// bits, also with the value in the word, which may be negative.
__device__ __forceinline__ void merge_amax(const NormForward& args, uint32_t amax, uint32_t* largest) {
    if (args.amax == nullptr) return;
    amax = __reduce_max_sync(kFullMask, amax);
    if (threadIdx.x % 32 == 0) atomicMax(largest, amax);
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(args.amax, static_cast<int32_t>(*largest));
}

// ---- wide rows
// The contract's numbers (kernels/ops/norm_order.h) on a Hopper GPU of 132 SMs: a strand is a thread, a part
// of dgamma is an SM, with one, two or four rows at a time (chunks). The segments of a row need as many SMs
// of one GPC, which has about 16. The number of parts is the number of clusters that surely fit at once, so
// that there is no second wave. Of 32 clusters of four, 30 fit; of clusters of two, all: a GPC has an even
// number of SMs.
constexpr int kNormThreads = static_cast<int>(op::kNormStrands), kNormWarps = kNormThreads / 32;
constexpr int kMinWidth = 1024;   // of a row that has a CTA per row or segment
constexpr int kMostSegments = 8;  // the largest portable cluster
constexpr int kMostUnits = static_cast<int>(op::kNormSegment) / (kUnit * kNormThreads);  // units per thread
static_assert(kNormThreads == kRowThreads && op::kNormUnit == kUnit);

__host__ __device__ constexpr int slot_bytes(int width) { return (2 * width + 127) / 128 * 128; }

// The part of every row that a CTA has: the whole row, or one segment of it; the other segments belong to the
// other CTAs of the cluster.
struct RowPart {
    int segments, rank;
    int first, units;  // first column; units of the part
};
template <int kUnits> __device__ __forceinline__ RowPart row_part(int cols, int segments, int segment_cols) {
    if (kUnits < kMostUnits || segments == 1) return {1, 0, 0, (cols + kUnit - 1) / kUnit};
    const int rank = static_cast<int>(cluster_rank()), first = rank * segment_cols;
    return {segments, rank, first, (min(segment_cols, cols - first) + kUnit - 1) / kUnit};
}

// How rows are loaded: whole units by TMA, ahead of time, or element by element when they are needed (odd
// widths, odd addresses).
enum class Rows { copied, fetched };

// Loads a part of a row into a slot by kNormThreads threads, element by element, with zeros after the end of
// the row. A barrier has to follow.
__device__ __forceinline__ void fetch_row(const RowView& from, int64_t row, const RowPart& part,
                                          uint8_t* slot, int thread) {
    constexpr int kBatch = 8;  // loads in flight
    const uint16_t* in = static_cast<const uint16_t*>(from.data) + row * from.cols + part.first;
    const int elements = part.units * kUnit, width = min(elements, from.cols - part.first);
    for (int first = thread; first < elements; first += kBatch * kNormThreads) {
        uint16_t values[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = first + i * kNormThreads;
            values[i] = at < width ? in[at] : uint16_t{0};
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + i * kNormThreads < elements)
                reinterpret_cast<uint16_t*>(slot)[first + i * kNormThreads] = values[i];
    }
}

// Issues the TMA load of a part of a row into a slot; it completes on the mbarrier.
__device__ __forceinline__ void issue_row(const RowView& from, int64_t row, const RowPart& part,
                                          uint8_t* slot, Mbarrier* barrier) {
    bulk_load(static_cast<const uint16_t*>(from.data) + row * from.cols + part.first, barrier, slot,
              static_cast<uint32_t>(2 * kUnit * part.units));
}
// Prefetches the same part into L2: its aligned 16-byte words, for rows of any width. Allowed before
// pdl_wait().
template <class T>
__device__ __forceinline__ void prefetch_row(const RowView& from, int64_t row, const RowPart& part) {
    constexpr uintptr_t kWhole = 16;
    const T* const data = static_cast<const T*>(from.data) + row * from.cols + part.first;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kWhole - 1) / kWhole * kWhole,
                    last =
                        reinterpret_cast<uintptr_t>(data + min(part.units * kUnit, from.cols - part.first)) /
                        kWhole * kWhole;
    if (first < last)
        prefetch_to_l2(reinterpret_cast<const void*>(first), static_cast<uint32_t>(last - first));
}
__device__ __forceinline__ void prefetch_row(const RowView& from, int64_t row, const RowPart& part) {
    prefetch_row<uint16_t>(from, row, part);
}
// The same for all inputs of a backward row.
__device__ __forceinline__ void prefetch_inputs(const NormBackward& args, int64_t row, const RowPart& part) {
    prefetch_row(args.dy, row, part);
    prefetch_row(args.x, row, part);
    if (args.dresidual) prefetch_row(args.dresidual, row, part);
}
__device__ __forceinline__ uint4 unit_of(const uint8_t* slot, int unit) {
    return reinterpret_cast<const uint4*>(slot)[unit];
}
__device__ __forceinline__ uint4* unit_of(const RowView& t, int64_t row, int unit) {
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + row * t.cols) + unit;
}
template <DType kType> __device__ __forceinline__ uint4 pack_unit(const float (&v)[kUnit]) {
    if constexpr (kType == DType::f16)
        return {pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
    return pack_unit_bf16(v);
}
// A unit of gamma, fp32 and aligned.
__device__ __forceinline__ void load_wide_gamma(const RowView& gamma, float offset, int unit,
                                                float (&g)[kUnit]) {
    load_floats(static_cast<const float4*>(gamma.data) + 2 * unit, g);
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

// The units of gamma of a thread.
template <Rows kRows, int kUnits>
__device__ __forceinline__ void load_gamma_units(const RowView& gamma, float offset, const RowPart& part,
                                                 int thread, float (&g)[kUnits][kUnit]) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        const int unit = thread + j * kNormThreads;
        if (unit >= part.units) continue;
        if constexpr (kRows == Rows::fetched)
            load_gamma(gamma, offset, part.first + unit * kUnit, g[j]);
        else
            load_wide_gamma(gamma, offset, part.first / kUnit + unit, g[j]);
    }
}

// Exchange of the segment sums of a row between the CTAs of a cluster. Rows alternate between two places: a
// CTA sends its sum after a barrier that all its threads reach after they read the row before, and no CTA
// continues without that sum, so that a place is overwritten only when it has been read everywhere. Each CTA
// arms its own mbarrier; bytes that arrive before that are counted all the same.
struct SegmentSums {
    float sums[2][kMostSegments];
    Mbarrier full[2];
};
__device__ __forceinline__ void prepare(SegmentSums& shared) {
    mbarrier_init(&shared.full[0], 1);
    mbarrier_init(&shared.full[1], 1);
}
// Row n of the CTA: send_sum sends the sum of its segment to all CTAs, await_sums waits for all of them. All
// kNormThreads threads call both.
__device__ __forceinline__ void send_sum(SegmentSums& shared, int n, const RowPart& part, float sum,
                                         int thread) {
    const int place = n % 2;
    if (thread == 0)
        mbarrier_arrive_expect_tx(&shared.full[place], static_cast<uint32_t>(part.segments * sizeof(float)));
    if (thread < part.segments)
        store_remote(cluster_address(&shared.sums[place][part.rank], static_cast<uint32_t>(thread)), sum,
                     cluster_address(&shared.full[place], static_cast<uint32_t>(thread)));
}
__device__ __forceinline__ float await_sums(SegmentSums& shared, int n, const RowPart& part) {
    const int place = n % 2;
    mbarrier_wait(&shared.full[place], static_cast<uint32_t>(n / 2) & 1u);
    float total = shared.sums[place][0];
#pragma unroll 1
    for (int i = 1; i < part.segments; ++i) total += shared.sums[place][i];
    return total;
}

// Rows that TMA can load, with at most as many segments as a cluster has CTAs.
inline bool is_wide(const RowView& rows, DType dtype) {
    return rows.dtype == dtype && rows.vector && rows.cols >= kMinWidth &&
           op::norm_segments(rows.cols) <= kMostSegments;
}
inline bool is_fetchable(const RowView& rows) {
    return is_half(rows.dtype) && rows.cols >= kMinWidth && op::norm_segments(rows.cols) <= kMostSegments;
}
// The same for x, dy, dx and dresidual of a backward pass.
inline bool is_backward_wide(const NormBackward& args) {
    const DType type = args.x.dtype;
    return args.gamma.vector && is_wide(args.x, type) && is_wide(args.dy, type) && is_wide(args.dx, type) &&
           (args.dresidual.data == nullptr || is_wide(args.dresidual, type));
}
inline bool is_backward_fetchable(const NormBackward& args) {
    const DType type = args.x.dtype;
    return is_fetchable(args.x) && args.dy.dtype == type &&
           (args.dresidual.data == nullptr || args.dresidual.dtype == type);
}
inline int units_a_thread(int width) {
    return static_cast<int>(ceil_div(ceil_div(width, kUnit), kNormThreads));
}

// Launches at most `ctas` CTAs per SM, a cluster for the segments of a row, and no more clusters than there
// are rows or fit at once. PDL: all threads of the kernel call pdl_wait() before they touch memory other than
// by prefetches into L2.
template <class Args>
void launch_rows(void (*kernel)(Args), const Args& args, int64_t rows, int ctas, dim3 threads,
                 std::size_t shared_bytes, const Launch& launch, const char* op) {
    const unsigned segments = static_cast<unsigned>(args.segments);
    unsigned clusters = std::max(1u, grid_for(rows * segments, launch, ctas) / segments);
    if (segments == 1) return launch_pdl(kernel, clusters, threads, shared_bytes, launch, op, args);
    cudaLaunchAttribute attributes[] = {cluster_attribute(segments), pdl_attribute()};
    const cudaLaunchConfig_t config =
        launch_config(std::span(attributes, 1), clusters * segments, threads, shared_bytes, launch);
    allow_shared_memory(kernel, shared_bytes, op);
    int most = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&most, kernel, &config), op);
    clusters = std::clamp(static_cast<unsigned>(most), 1u, clusters);
    launch_with(attributes, kernel, clusters * segments, threads, shared_bytes, launch, op, args);
}

// False where these rows need another kernel: nothing is launched.
bool launch_norm_rows(const NormForward& args, const Launch& launch);
// dx and the sums of the parts of dgamma: front for rows of 2049 columns to four segments, rows for the other
// wide ones.
bool launch_norm_backward_front(NormBackward args, const Launch& launch);
bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch);

}  // namespace fp8flow::hopper::norm
