// SPDX-License-Identifier: MIT
// What RMSNorm's kernels share: arguments, the order of a sum over a row, and what the kernels for wide rows
// of BF16 or FP16 do alike.
#pragma once

#include "kernels/hopper/device/cluster.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/device/scales.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/ops/norm.h"

namespace fp8flow::hopper {

struct NormForward {
    RowView x, gamma, y;  // y optional
    int64_t rows;
    float eps, gamma_offset;
    float* rstd;
    RowView codes;              // optional
    RowScales scales;           // data == nullptr: per-tensor codes
    const float* tensor_scale;  // of per-tensor codes
    int32_t* amax;              // optional: a float that is not NaN; not below 0 once something came
    QuantizeRule rule;
    int segments, segment_cols;  // of a row (kernels/ops/norm.h); one: all columns
};

struct NormBackward {
    RowView dy, x, gamma, dresidual, dx;  // dresidual optional
    int64_t rows;
    float gamma_offset;
    const float* rstd;
    int segments, segment_cols;
    int parts, chunks;  // of dgamma; chunks a part
    float* partials;    // [min(parts, rows), H]: sums of parts
    uint32_t*
        asked;  // rows asked for by all CTAs or clusters; 0 before and, by the kernel for dgamma, afterwards
    // front_backward.cu
    int depth = 0;  // rows in shared memory
    int hold =
        -1;  // a CTA asks for no row that is more quarters of a row ahead of the mean; below 0: for any
};

__device__ __forceinline__ void load_gamma(const RowView& gamma, float offset, int col, float (&g)[kUnit]) {
    load_unit(gamma, 0, col, g);
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

// The sum over a segment: thread t holds strand t (units t, t + 256, ...). A barrier stands between the two
// functions; every thread gets the sum. `warp_sums` are eight words, 0 where the CTA has no such warp.
__device__ __forceinline__ void put_strand(float strand, float* warp_sums) {
    for (int step = 16; step > 0; step /= 2) strand += __shfl_xor_sync(kFullMask, strand, step);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = strand;
}
__device__ __forceinline__ float row_sum(const float* warp_sums) {
    return combine_lanes(warp_sums[threadIdx.x % 8]);
}

// One unit of the output: values before rounding (0 past the row's end) to y, codes, scales and the maximum.
__device__ __forceinline__ void write_unit(const NormForward& args, int64_t row, int col, float multiplier,
                                           float (&v)[kUnit], uint32_t& amax) {
    const int width = args.x.cols;
    if (args.amax != nullptr) amax = max(amax, unit_magnitude(v));
    if (args.y && col < width) store_unit(args.y, row, col, v);
    if (!args.codes) return;
    if (args.scales.data == nullptr) {
        if (col < width) store_codes(args.codes, row, col, encode_unit(v, multiplier, args.codes.dtype));
        return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {  // to BF16 and back
        const uint32_t pair = pack_bf16(v[i], v[i + 1]);
        v[i] = __uint_as_float(pair << 16);
        v[i + 1] = __uint_as_float(pair & 0xFFFF0000u);
    }
    quantize_unit(v, true, args.codes, args.scales, row, col, args.rule);
}
// The CTA's maximum into the word outside: one atomic a CTA, since all go to one place. `largest`: shared, 0
// since before a barrier; all threads call it. Magnitudes compare like their bits, also with what the word
// held, which may be negative.
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
// of one GPC, which has about 16: there are as many parts as such clusters surely find room at once, lest a
// second wave waits for the first. Of 32 clusters of four, 30 fitted; of two, all: a GPC has an even number.
constexpr int kNormThreads = static_cast<int>(op::kNormStrands), kNormWarps = kNormThreads / 32;
constexpr int kMinWidth = 1024;   // a CTA per row or segment
constexpr int kMostSegments = 8;  // of a cluster that every GPU takes
constexpr int kMostUnits = static_cast<int>(op::kNormSegment) / (kUnit * kNormThreads);  // of a thread
static_assert(kNormThreads == kRowThreads && op::kNormUnit == kUnit);

__host__ __device__ constexpr int slot_bytes(int width) { return (2 * width + 127) / 128 * 128; }

// What a CTA has of every row: all of it, or one segment of it, the others' being in the CTAs of its cluster.
struct RowPart {
    int segments, rank;
    int first, units;  // first column
};
template <int kUnits> __device__ __forceinline__ RowPart row_part(int cols, int segments, int segment_cols) {
    if (kUnits < kMostUnits || segments == 1) return {1, 0, 0, (cols + kUnit - 1) / kUnit};
    const int rank = static_cast<int>(cluster_rank()), first = rank * segment_cols;
    return {segments, rank, first, (min(segment_cols, cols - first) + kUnit - 1) / kUnit};
}

// How rows come: whole units by TMA, ahead of time, or element by element when their turn comes
// (odd widths, odd addresses).
enum class Rows { copied, fetched };

// A part of a row into a slot by kNormThreads threads, element by element, zeros behind the row's end; a
// barrier has to follow.
__device__ __forceinline__ void fetch_row(const RowView& from, int64_t row, const RowPart& part,
                                          uint8_t* slot, int thread) {
    constexpr int kBatch = 8;  // loads on their way
    const uint16_t* in = static_cast<const uint16_t*>(from.data) + row * from.cols + part.first;
    const int wanted = part.units * kUnit, width = min(wanted, from.cols - part.first);
    for (int first = thread; first < wanted; first += kBatch * kNormThreads) {
        uint16_t values[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = first + i * kNormThreads;
            values[i] = at < width ? in[at] : uint16_t{0};
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (first + i * kNormThreads < wanted)
                reinterpret_cast<uint16_t*>(slot)[first + i * kNormThreads] = values[i];
    }
}

// Starts the copy of a part of a row into a slot; it completes on the barrier.
__device__ __forceinline__ void start_row(const RowView& from, int64_t row, const RowPart& part,
                                          uint8_t* slot, Mbarrier* barrier) {
    bulk_load(static_cast<const uint16_t*>(from.data) + row * from.cols + part.first, barrier, slot,
              static_cast<uint32_t>(2 * kUnit * part.units));
}
// The same part to L2 only, which a kernel may ask for before it waits for the kernel before it: the aligned
// 16 bytes of it, of any width.
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
// The same of all inputs of a backward row.
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
    const float4* in = static_cast<const float4*>(gamma.data) + 2 * unit;
    const float4 a = in[0], b = in[1];
    g[0] = a.x, g[1] = a.y, g[2] = a.z, g[3] = a.w;
    g[4] = b.x, g[5] = b.y, g[6] = b.z, g[7] = b.w;
    if (offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) g[i] = offset + g[i];
}

// The sums of a row's segments on their way to every CTA of the cluster. Rows alternate between two places: a
// CTA sends its sum behind a barrier that all its threads reach behind their reading of the row before, and
// nobody goes on without it, so that a place is written again only when it has been read everywhere. Each
// arms its own barrier; bytes that come earlier are counted all the same.
struct SegmentSums {
    float sums[2][kMostSegments];
    Mbarrier full[2];
};
__device__ __forceinline__ void prepare(SegmentSums& shared) {
    mbarrier_init(&shared.full[0], 1);
    mbarrier_init(&shared.full[1], 1);
}
// Row n of the CTA: its segment's sum goes out, all of them come in. All kNormThreads threads call both.
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

// Rows that TMA can bring, in as many segments as a cluster has CTAs.
inline bool is_wide(const RowView& rows, DType dtype) {
    return rows.dtype == dtype && rows.vector && rows.cols >= kMinWidth &&
           op::norm_segments(rows.cols) <= kMostSegments;
}
inline bool is_fetchable(const RowView& rows) {
    return (rows.dtype == DType::bf16 || rows.dtype == DType::f16) && rows.cols >= kMinWidth &&
           op::norm_segments(rows.cols) <= kMostSegments;
}
// The same of all rows of a backward pass.
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

// `ctas` of an SM at most, a cluster for the segments of a row, no more clusters than rows or find room at
// once. `behind`: all threads of the kernel call pdl_wait() before they touch memory but by prefetches to L2,
// so that it may start while the kernel before it ends.
template <class Args>
void launch_rows(void (*kernel)(Args), const Args& args, int64_t rows, int ctas, dim3 block, int bytes,
                 const Launch& launch, const char* op, bool behind = false) {
    constexpr int kDefault = 48 * 1024, kOwn = 4 * 1024;  // of the kernel's own variables, at most
    if (bytes > kDefault - kOwn)
        allow_shared_memory(kernel, static_cast<std::size_t>(bytes), "shared memory of rms_norm");
    const unsigned segments = static_cast<unsigned>(args.segments);
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.blockDim = block;
    config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
    config.stream = stream_of(launch);
    config.attrs = attributes;
    unsigned clusters = std::max(1u, grid_for(rows * segments, launch, ctas) / segments);
    config.gridDim = clusters * segments;
    if (segments > 1) {
        attributes[config.numAttrs++] = cluster_attribute(segments);
        int room = 0;
        check_cuda(cudaOccupancyMaxActiveClusters(&room, kernel, &config), op);
        clusters = std::clamp(static_cast<unsigned>(room), 1u, clusters);
        config.gridDim = clusters * segments;
    }
    if (behind) attributes[config.numAttrs++] = pdl_attribute();
    check_cuda(cudaLaunchKernelEx(&config, kernel, args), op);
}

// False: these rows need the other kernels.
bool launch_norm_rows(const NormForward& args, const Launch& launch);
// dx and the sums of dgamma's parts: rows of 2049 columns to four segments, and others
bool launch_norm_backward_front(NormBackward args, const Launch& launch);
bool launch_norm_backward_rows(const NormBackward& args, const Launch& launch);

}  // namespace fp8flow::hopper
