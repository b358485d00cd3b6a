// SPDX-License-Identifier: MIT
// Rotary embedding, and the copies between the packed projection and q, k, v: one pass over memory each, with
// the reference's bits.
#include "kernels/hopper/attention/heads.h"
#include "kernels/hopper/device/rows.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/norm/dgamma.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::attention {

namespace {

constexpr int kThreads = 256;

struct RopeUnits {
    uint16_t* x;
    const float* table;
    uint32_t length, heads, head_groups, units, items;  // units: of eight pairs, in half a head
    float sign;
};

// Rotates x in place: BF16, D / 2 a multiple of eight, aligned.
//
// Lower bound: x read and written once (134 MB at T=4096, 64 heads of 128: 33 us), the table from L2; 3 FLOPs
// per element.
//
// Thread: the same eight pairs of kRopeHeads heads of a token, so that the eight angles are loaded once and
// eight 16-byte loads are in flight together (three CTAs per SM: 96 KB); consecutive threads take consecutive
// units, then heads. No barriers. Deterministic: each pair belongs to one thread.
constexpr int kRopeHeads = 4;
__global__ __launch_bounds__(kThreads, 3) void rope_units_kernel(const RopeUnits args) {
    const int64_t half = int64_t{args.units} * kUnit;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < args.items;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const uint32_t item = static_cast<uint32_t>(i), unit = item % args.units, rest = item / args.units;
        const uint32_t group = rest % args.head_groups, token = rest / args.head_groups;
        uint16_t* const first = args.x + int64_t{token} * args.heads * 2 * half + unit * kUnit;
        uint4 low[kRopeHeads], high[kRopeHeads];
#pragma unroll
        for (int j = 0; j < kRopeHeads; ++j) {
            const uint32_t head = group + static_cast<uint32_t>(j) * args.head_groups;
            if (head >= args.heads) continue;
            low[j] = *reinterpret_cast<const uint4*>(first + head * 2 * half);
            high[j] = *reinterpret_cast<const uint4*>(first + head * 2 * half + half);
        }
        float cosine[kUnit], sine[kUnit];
        const float4* angle =
            reinterpret_cast<const float4*>(args.table + 2 * (token % args.length * half + unit * kUnit));
#pragma unroll
        for (int n = 0; n < kUnit / 2; ++n) {
            const float4 two = angle[n];
            cosine[2 * n] = two.x, sine[2 * n] = args.sign * two.y;
            cosine[2 * n + 1] = two.z, sine[2 * n + 1] = args.sign * two.w;
        }
#pragma unroll
        for (int j = 0; j < kRopeHeads; ++j) {
            const uint32_t head = group + static_cast<uint32_t>(j) * args.head_groups;
            if (head >= args.heads) continue;
            float a[kUnit], b[kUnit];
            unpack_unit(low[j], DType::bf16, a);
            unpack_unit(high[j], DType::bf16, b);
#pragma unroll
            for (int n = 0; n < kUnit; ++n) {
                const float x = a[n], y = b[n];
                a[n] = fma_float(x, cosine[n], -(y * sine[n]));
                b[n] = fma_float(y, cosine[n], x * sine[n]);
            }
            *reinterpret_cast<uint4*>(first + head * 2 * half) = pack_unit_bf16(a);
            *reinterpret_cast<uint4*>(first + head * 2 * half + half) = pack_unit_bf16(b);
        }
    }
}

// The same for any dtype, depth and alignment. Grid-stride over the pairs (i, i + D/2).
__global__ void rope_kernel(DeviceView x, const float* table, int64_t length, int64_t heads, int64_t half,
                            float sign, int64_t pairs) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t pair = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pair < pairs;
         pair += step) {
        const int64_t i = pair % half, row = pair / half, token = row / heads;
        const float* angle = table + 2 * (token % length * half + i);
        const float cosine = angle[0], sine = sign * angle[1];
        const int64_t low = row * 2 * half + i, high = low + half;
        const float a = load_float(x.data, x.dtype, low), b = load_float(x.data, x.dtype, high);
        store_float(x.data, x.dtype, low, fma_float(a, cosine, -(b * sine)));
        store_float(x.data, x.dtype, high, fma_float(b, cosine, a * sine));
    }
}

// One of q, k, v: columns [first, first + width) of packed rows of `stride`, and its contiguous tensor [T,
// width]; in words of the copy.
struct Part {
    uint8_t* data;
    int64_t first, width;
};
struct Packed {
    uint8_t* data;
    int64_t tokens, stride;
    Part parts[3];
};
enum class Copy { split, merge };

// Adds the bias to q, k and v in place: any dtype, depth and alignment. Grid-stride over the packed elements.
__global__ void add_bias_kernel(DeviceView q, DeviceView k, DeviceView v, const float* bias, int64_t first_k,
                                int64_t first_v, int64_t stride, int64_t elements) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
        const int64_t token = i / stride, column = i % stride;
        // selected, because an index would put the views into local memory
        const DeviceView part = column >= first_v ? v : column >= first_k ? k : q;
        const int64_t first = column >= first_v ? first_v : column >= first_k ? first_k : 0;
        const int64_t width = column >= first_v   ? stride - first_v
                              : column >= first_k ? first_v - first_k
                                                  : first_k;
        const int64_t at = token * width + column - first;
        store_float(part.data, part.dtype, at, load_float(part.data, part.dtype, at) + bias[column]);
    }
}

// The gradient of the bias, a sum over rows: chunks [kBiasChunks, width] of the rows of x, then their sum.
// Lower bound: x read once: T=8192, 96 + 2 x 8 heads of 128: 235 MB, 55 us; the chunks are in L2.
// A thread takes a column of a chunk, with kBiasAhead loads in flight; then a column. No barriers.
// Deterministic: sums in the order of the contract, one writer per value.
constexpr int kBiasAhead = 8;
__global__ void __launch_bounds__(kThreads)
    bias_chunks_kernel(DeviceView x, int64_t rows, int64_t width, float* chunks) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
    for (int64_t first = blockIdx.y; first < rows; first += kBiasAhead * op::kBiasChunks) {
        float values[kBiasAhead];
#pragma unroll
        for (int n = 0; n < kBiasAhead; ++n) {
            const int64_t row = first + n * op::kBiasChunks;
            values[n] = row < rows ? load_float(x.data, x.dtype, row * width + column) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kBiasAhead; ++n)
            if (first + n * op::kBiasChunks < rows) sum += values[n];
    }
    chunks[blockIdx.y * width + column] = sum;
}
__global__ void __launch_bounds__(kThreads)
    bias_sum_kernel(const float* chunks, int64_t width, Gradient mode, float* dbias) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
#pragma unroll 16
    for (int64_t chunk = 0; chunk < op::kBiasChunks; ++chunk) sum += chunks[chunk * width + column];
    dbias[column] = mode == Gradient::accumulate ? dbias[column] + sum : sum;
}

// chunks: kBiasChunks words per column.
void sum_bias(const TensorView& dqkv, Gradient mode, const TensorView& dbias, float* chunks,
              const Launch& launch) {
    const int64_t width = dqkv.cols();
    const auto columns = static_cast<unsigned>(ceil_div(width, kThreads));
    constexpr const char* kOp = "gradient of the bias";
    launch_kernel(bias_chunks_kernel, dim3(columns, static_cast<unsigned>(op::kBiasChunks)), kThreads, launch,
                  kOp, device_view(dqkv), dqkv.dim(0), width, chunks);
    launch_kernel(bias_sum_kernel, columns, kThreads, launch, kOp, chunks, width, mode, dbias.as<float>());
}

// Bytes: everything read and written once. Grid-stride over the words of the packed rows. No barriers.
// Deterministic: one writer per word.
template <class Word> __global__ void packed_kernel(Packed packed, Copy copy) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads, words = packed.tokens * packed.stride;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words; i += step) {
        const int64_t token = i / packed.stride, column = i % packed.stride;
        // selected, because an index would put the parts into local memory
        const Part part = column >= packed.parts[2].first   ? packed.parts[2]
                          : column >= packed.parts[1].first ? packed.parts[1]
                                                            : packed.parts[0];
        Word* apart = reinterpret_cast<Word*>(part.data) + token * part.width + column - part.first;
        Word* together = reinterpret_cast<Word*>(packed.data) + i;
        if (copy == Copy::split)
            *apart = *together;
        else
            *together = *apart;
    }
}

void copy_packed(const TensorView& qkv, const TensorView& q, const TensorView& k, const TensorView& v,
                 Copy copy, const Launch& launch) {
    if (qkv.numel() == 0) return;
    const int64_t width = size_of(qkv.dtype), depth_bytes = q.dim(2) * width;
    bool aligned = depth_bytes % 16 == 0;
    for (const TensorView* view : {&qkv, &q, &k, &v}) aligned = aligned && is_aligned(view->data);
    const int64_t word = aligned ? 16 : width;
    const auto words_of = [&](const TensorView& view) { return view.dim(1) * depth_bytes / word; };
    const Packed packed{.data = qkv.bytes_ptr(),
                        .tokens = qkv.dim(0),
                        .stride = qkv.cols() * width / word,
                        .parts = {{q.bytes_ptr(), 0, words_of(q)},
                                  {k.bytes_ptr(), words_of(q), words_of(k)},
                                  {v.bytes_ptr(), words_of(q) + words_of(k), words_of(v)}}};
    const auto kernel = word == 16  ? packed_kernel<uint4>
                        : word == 4 ? packed_kernel<uint32_t>
                                    : packed_kernel<uint16_t>;
    launch_kernel(kernel, grid_for(ceil_div(packed.tokens * packed.stride, kThreads), launch), kThreads,
                  launch, copy == Copy::split ? "split_qkv" : "merge_qkv", packed, copy);
}

}  // namespace

}  // namespace fp8flow::hopper::attention

namespace fp8flow {

using namespace hopper;
using namespace hopper::attention;

void HopperOps::do_rope(const op::Rope& args, const Launch& launch) {
    const int64_t pairs = args.x.numel() / 2;
    if (pairs == 0) return;
    const float sign = args.direction == op::RopeDirection::forward ? 1.0f : -1.0f;
    const int64_t heads = args.x.dim(1), half = args.x.dim(2) / 2;
    const int64_t head_groups = ceil_div(heads, kRopeHeads),
                  items = args.x.dim(0) * head_groups * (half / kUnit);
    if (args.x.dtype == DType::bf16 && half % kUnit == 0 && is_aligned(args.x.data) &&
        is_aligned(args.table.data) && std::max(items, args.table.dim(0)) <= UINT32_MAX) {
        const RopeUnits job{.x = static_cast<uint16_t*>(args.x.data),
                            .table = args.table.as<float>(),
                            .length = static_cast<uint32_t>(args.table.dim(0)),
                            .heads = static_cast<uint32_t>(heads),
                            .head_groups = static_cast<uint32_t>(head_groups),
                            .units = static_cast<uint32_t>(half / kUnit),
                            .items = static_cast<uint32_t>(items),
                            .sign = sign};
        launch_kernel(rope_units_kernel, grid_for(ceil_div(items, kThreads), launch), kThreads, launch,
                      "rope", job);
        return;
    }
    launch_kernel(rope_kernel, grid_for(ceil_div(pairs, kThreads), launch), kThreads, launch, "rope",
                  device_view(args.x), args.table.as<float>(), args.table.dim(0), heads, half, sign, pairs);
}

void HopperOps::do_qkv_heads(const op::QkvHeads& args, const Launch& launch) {
    if (!launch_heads(args, launch)) Ops::do_qkv_heads(args, launch);
}

void HopperOps::do_qkv_heads_backward(const op::QkvHeadsBackward& args, const Launch& launch) {
    float* const partials = workspace(launch).partials_for<float>(heads_backward_partials(args.dq.dim(2)));
    uint32_t* const tickets = workspace(launch).zeros_for<uint32_t>(norm::gamma_tickets(args.dq.dim(2), 2));
    op::QkvHeadsBackward heads = args;
    if (args.dbias) heads.rows = {};  // the bias needs the rows in BF16
    if (!launch_heads_backward(heads, partials, tickets, launch))
        return Ops::do_qkv_heads_backward(args, launch);
    if (!args.dbias) return;
    sum_bias(args.dqkv, args.dgamma_mode, args.dbias,
             workspace(launch).partials_for<float>(op::kBiasChunks * args.dqkv.cols()), launch);
    if (args.rows)
        do_quantize_rows({.src = args.dqkv, .scale_format = args.scale_format, .dst = args.rows}, launch);
}

void HopperOps::do_split_qkv(const op::SplitQkv& args, const Launch& launch) {
    copy_packed(args.qkv, args.q, args.k, args.v, Copy::split, launch);
    if (!args.bias || args.qkv.numel() == 0) return;
    const int64_t query = args.q.dim(1) * args.q.dim(2), key = args.k.dim(1) * args.k.dim(2);
    launch_kernel(add_bias_kernel, grid_for(ceil_div(args.qkv.numel(), kThreads), launch), kThreads, launch,
                  "split_qkv: bias", device_view(args.q), device_view(args.k), device_view(args.v),
                  args.bias.as<float>(), query, query + key, args.qkv.cols(), args.qkv.numel());
}

void HopperOps::do_merge_qkv(const op::MergeQkv& args, const Launch& launch) {
    copy_packed(args.qkv, args.q, args.k, args.v, Copy::merge, launch);
    if (args.dbias)
        sum_bias(args.qkv, args.dbias_mode, args.dbias,
                 workspace(launch).partials_for<float>(op::kBiasChunks * args.qkv.cols()), launch);
}

}  // namespace fp8flow
