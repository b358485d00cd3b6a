// SPDX-License-Identifier: MIT
// Embedding and its gradient on the GPU, bit-equal to the reference. A kernel cannot report a token id: the
// data loader checks ids, and here an id outside the vocabulary gives NaN (a step that is then skipped),
// never an address.
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/vector_io.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/head/embedding.h"
#include "kernels/hopper/head/sort_tokens.h"
#include "kernels/hopper/hopper_ops.h"
#include "kernels/hopper/runtime/launch.h"
#include "kernels/hopper/workspace.h"

namespace fp8flow::hopper::head {

namespace {

constexpr uint32_t kNanBits = 0x7FC00000u;

// y[t] = table[ids[t]] for any dtypes. Bytes: one table row read, one activation row written per token.
// One warp per token, eight elements per thread and iteration. Element-wise.
constexpr int kRowWarps = 8;
__global__ __launch_bounds__(kRowWarps* kWarpSize) void embedding_kernel(const int32_t* ids, int64_t tokens,
                                                                         DeviceView table, DeviceView y,
                                                                         bool vectorised) {
    const int64_t vocab = table.dims[0], hidden = table.dims[1];
    const int lane = threadIdx.x % kWarpSize;
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarpSize; t < tokens;
         t += static_cast<int64_t>(gridDim.x) * kRowWarps) {
        const int64_t id = ids[t];
        const bool known = id >= 0 && id < vocab;
        for (int64_t column = lane * kUnit; column < hidden; column += kWarpSize * kUnit) {
            float values[kUnit];
            load_up_to_8(table.data, table.dtype, (known ? id : 0) * hidden + column, hidden - column,
                         vectorised, values);
            if (!known) {
#pragma unroll
                for (int j = 0; j < kUnit; ++j) values[j] = bits_float(kNanBits);
            }
            store_up_to_8(y.data, y.dtype, t * hidden + column, hidden - column, vectorised, values);
        }
    }
}

// The same as a copy, where table and y have one dtype and rows are whole 16-byte words. Lower bound: 117 MB
// of BF16 at T=4096, H=7168: 29 us. CTA: up to 8 KB of a row, four words per thread in flight: 128 KB per SM.
// Element-wise.
constexpr int kCopyThreads = 128, kCopyWords = 4, kSlabWords = kCopyThreads * kCopyWords;
__global__ __launch_bounds__(kCopyThreads) void embedding_copy_kernel(const int32_t* ids, int64_t tokens,
                                                                      int64_t vocab, const uint4* table,
                                                                      uint4* y, int words, uint32_t nan) {
    const unsigned slabs = static_cast<unsigned>((words + kSlabWords - 1) / kSlabWords);
    for (int64_t item = blockIdx.x; item < tokens * slabs; item += gridDim.x) {
        const int64_t t = static_cast<unsigned>(item) / slabs;  // items are fewer than 2^31
        const int first = static_cast<int>(static_cast<unsigned>(item) % slabs) * kSlabWords +
                          static_cast<int>(threadIdx.x);
        const int64_t id = ids[t];
        const bool known = id >= 0 && id < vocab;
        const uint4* const from = table + (known ? id : 0) * words;
        uint4 piece[kCopyWords];
#pragma unroll
        for (int j = 0; j < kCopyWords; ++j)
            if (first + j * kCopyThreads < words)
                piece[j] = known ? from[first + j * kCopyThreads] : uint4{nan, nan, nan, nan};
#pragma unroll
        for (int j = 0; j < kCopyWords; ++j)
            if (first + j * kCopyThreads < words) y[t * words + first + j * kCopyThreads] = piece[j];
    }
}

// Four columns of a gradient row: as loaded, and as floats.
struct Bf16Rows {
    using Raw = uint2;
    static constexpr int kCtasPerSm = 4;
    static constexpr int kBatch = 16;  // rows in flight per thread
    static __device__ Raw load(const DeviceView& dy, int64_t at, int64_t) {
        return *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(dy.data) + at);
    }
    static __device__ void add(Raw raw, float (&sum)[4]) {
        sum[0] += bits_float(raw.x << 16), sum[1] += bits_float(raw.x & 0xFFFF0000u);
        sum[2] += bits_float(raw.y << 16), sum[3] += bits_float(raw.y & 0xFFFF0000u);
    }
    static __device__ void load_sum(const float* from, int64_t, float (&sum)[4]) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        sum[0] = four.x, sum[1] = four.y, sum[2] = four.z, sum[3] = four.w;
    }
    static __device__ void store_sum(const float (&sum)[4], int64_t, float* to) {
        *reinterpret_cast<float4*>(to) = float4{sum[0], sum[1], sum[2], sum[3]};
    }
};
struct AnyRows {  // any dtype and alignment; `left` columns are inside the row
    using Raw = float4;
    static constexpr int kCtasPerSm = 3, kBatch = 8;
    static __device__ Raw load(const DeviceView& dy, int64_t at, int64_t left) {
        return float4{load_float(dy.data, dy.dtype, at),
                      left > 1 ? load_float(dy.data, dy.dtype, at + 1) : 0.0f,
                      left > 2 ? load_float(dy.data, dy.dtype, at + 2) : 0.0f,
                      left > 3 ? load_float(dy.data, dy.dtype, at + 3) : 0.0f};
    }
    static __device__ void add(Raw raw, float (&sum)[4]) {
        sum[0] += raw.x, sum[1] += raw.y, sum[2] += raw.z, sum[3] += raw.w;
    }
    static __device__ void load_sum(const float* from, int64_t left, float (&sum)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = j < left ? from[j] : 0.0f;
    }
    static __device__ void store_sum(const float (&sum)[4], int64_t left, float* to) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (j < left) to[j] = sum[j];
    }
};

// Which of the sorted places from `place` on belong to `owner` (one bit per place, the lowest is the first),
// and their positions. Without a branch, so that all loads are in flight together.
template <int kBatch> struct OwnPlaces {
    uint32_t mine;
    int32_t positions[kBatch];
};
template <int kBatch>
__device__ __forceinline__ OwnPlaces<kBatch> own_places(const int32_t* sorted_ids, const int32_t* order,
                                                        int64_t place, int64_t tokens, int32_t owner) {
    OwnPlaces<kBatch> own{};
    int32_t ids[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const int64_t at = min(place + i, tokens - 1);
        ids[i] = sorted_ids[at];
        own.positions[i] = order[at];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) own.mine |= place + i < tokens && ids[i] == owner ? 1u << i : 0u;
    return own;
}

// dtable[id] (+)= the gradient rows of its tokens in ascending order.
//
// Lower bound: dy read once (58.7 MB at T=4096, H=7168: 14 us), the touched table rows once.
//
// CTA: kPlaces places of the sorted tokens and some tiles of 512 columns, four columns of each per thread.
// The CTA owns the ids that begin among its places, up to their last token, which may lie beyond them. Ids
// and positions are read once for all tiles. All rows of the places, of dy and of the table, are loaded
// before the first addition, because a load of the table after a store would wait for it: 24 bytes per place
// and thread, 98 KB in flight per SM. Then kBatch rows at a time, the next ones' places in flight with them:
// an id with many tokens (a byte of a text: some hundreds) waits for memory once per batch. No shared memory,
// no barriers.
//
// Deterministic: one writer per element, the reference's order.
//
// PDL: pointers are without __restrict__, because the sort writes what this kernel reads.
constexpr int kTokensPerId = 8;  // from this mean number on, embedding_few_ids.cu
constexpr int kWaves = 6;        // of CTAs, at least, where there is enough work
constexpr int kGradThreads = 128, kGradColumns = 4 * kGradThreads, kPlaces = 8;
template <class Rows>
__global__ __launch_bounds__(kGradThreads, Rows::kCtasPerSm) void embedding_backward_kernel(
    const int32_t* sorted_ids, const int32_t* order, DeviceView dy, Gradient mode, float* dtable,
    int64_t vocab, int64_t splits) {
    const int64_t tokens = dy.dims[0], hidden = dy.dims[1];
    const int64_t column_tiles = (hidden + kGradColumns - 1) / kGradColumns,
                  ranges = (tokens + kPlaces - 1) / kPlaces;
    constexpr int32_t kNone = -1;  // no id, or one outside the vocabulary
    pdl_wait();                    // the sort
    for (int64_t item = blockIdx.x; item < ranges * splits; item += gridDim.x) {
        const int64_t first = item / splits * kPlaces;
        // owners[i]: the id that place first + i adds to, if that id begins among these places
        int32_t owners[kPlaces], ids[kPlaces], positions[kPlaces],
            previous = first > 0 ? sorted_ids[first - 1] : kNone;
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
            const bool inside = first + i < tokens;
            ids[i] = inside ? sorted_ids[first + i] : kNone;
            positions[i] = inside ? order[first + i] : 0;
        }
        int32_t owner = kNone;
        uint32_t heads = 0;
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) {
            const int64_t place = first + i;
            if (place >= tokens) {
                owner = kNone;
            } else {
                if (place == 0 || previous != ids[i]) {
                    owner = ids[i] >= 0 && ids[i] < vocab ? ids[i] : kNone;
                    heads |= 1u << i;
                }
                previous = ids[i];
            }
            owners[i] = owner;
        }
        for (int64_t tile = item % splits; tile < column_tiles; tile += splits) {
            const int64_t column = tile * kGradColumns + threadIdx.x * 4, left = hidden - column;
            if (left <= 0) continue;
            typename Rows::Raw rows[kPlaces];
            float before[kPlaces][4] = {};  // the table's value for an id that begins here
#pragma unroll
            for (int i = 0; i < kPlaces; ++i) {
                if (owners[i] == kNone) continue;
                rows[i] = Rows::load(dy, int64_t{positions[i]} * hidden + column, left);
                if (mode == Gradient::accumulate && (heads >> i & 1u) != 0)
                    Rows::load_sum(dtable + int64_t{owners[i]} * hidden + column, left, before[i]);
            }
            float sum[4] = {};
#pragma unroll
            for (int i = 0; i < kPlaces; ++i) {
                if (owners[i] == kNone) continue;
                float* const to = dtable + int64_t{owners[i]} * hidden + column;
                if ((heads >> i & 1u) != 0) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[j] = before[i][j];
                }
                Rows::add(rows[i], sum);
                if (i + 1 < kPlaces && owners[i + 1] != owners[i]) Rows::store_sum(sum, left, to);
            }
            if (owner == kNone) continue;
            constexpr int kBatch = Rows::kBatch;
            int64_t place = first + kPlaces;
            OwnPlaces<kBatch> next = own_places<kBatch>(sorted_ids, order, place, tokens, owner);
            while (next.mine != 0) {
                const uint32_t mine = next.mine;
                typename Rows::Raw batch[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    if ((mine >> i & 1u) != 0)
                        batch[i] = Rows::load(dy, int64_t{next.positions[i]} * hidden + column, left);
                place += kBatch;
                next = own_places<kBatch>(sorted_ids, order, place, tokens, owner);
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    if ((mine >> i & 1u) != 0) Rows::add(batch[i], sum);
            }
            Rows::store_sum(sum, left, dtable + int64_t{owner} * hidden + column);
        }
    }
}

}  // namespace

}  // namespace fp8flow::hopper::head

namespace fp8flow {

using namespace hopper;
using namespace hopper::head;

void HopperOps::do_embedding(const op::Embedding& args, const Launch& launch) {
    const int64_t tokens = args.y.dim(0), hidden = args.table.dim(1);
    if (tokens == 0 || hidden == 0) return;
    const bool vectorised = is_vectorisable(args.table.data, hidden) && is_vectorisable(args.y.data, hidden);
    const int64_t words = hidden * size_of(args.y.dtype) / 16, items = tokens * ceil_div(words, kSlabWords);
    if (vectorised && args.table.dtype == args.y.dtype && items < int64_t{1} << 31 &&
        (args.y.dtype == DType::bf16 || args.y.dtype == DType::f32)) {
        launch_kernel(embedding_copy_kernel, grid_of_items(items, launch, 16), kCopyThreads, launch,
                      "embedding", args.ids.as<int32_t>(), tokens, args.table.dim(0),
                      static_cast<const uint4*>(args.table.data), static_cast<uint4*>(args.y.data), words,
                      args.y.dtype == DType::f32 ? kNanBits : kNanBits | kNanBits >> 16);
        return;
    }
    launch_kernel(embedding_kernel, grid_for(ceil_div(tokens, kRowWarps), launch), kRowWarps * kWarpSize,
                  launch, "embedding", args.ids.as<int32_t>(), tokens, device_view(args.table),
                  device_view(args.y), vectorised);
}

void HopperOps::do_embedding_backward(const op::EmbeddingBackward& args, const Launch& launch) {
    const int64_t tokens = args.dy.dim(0), hidden = args.dtable.dim(1);
    const auto zero = [&] {
        if (args.mode == Gradient::overwrite) do_zero({.y = args.dtable}, launch);
    };
    if (tokens == 0 || hidden == 0) return zero();
    const bool wide = args.dy.dtype == DType::bf16 && is_vectorisable(args.dy.data, hidden) &&
                      is_vectorisable(args.dtable.data, hidden);
    const bool few_ids = wide && tokens >= kTokensPerId * args.dtable.dim(0);
    if (!few_ids) zero();
    const int64_t list_bytes = round_up(tokens * static_cast<int64_t>(sizeof(int32_t)), 256);
    uint8_t* const scratch = workspace(launch).partials_for<uint8_t>(
        2 * list_bytes + static_cast<int64_t>(sort_tokens_scratch(tokens)));
    int32_t* const sorted_ids = reinterpret_cast<int32_t*>(scratch);
    int32_t* const order = reinterpret_cast<int32_t*>(scratch + list_bytes);
    sort_tokens({.ids = args.ids.as<int32_t>(),
                 .tokens = tokens,
                 .sorted_ids = sorted_ids,
                 .order = order,
                 .scratch = scratch + 2 * list_bytes},
                launch);
    if (few_ids)
        return embedding_backward_few_ids({.sorted_ids = sorted_ids,
                                           .order = order,
                                           .dy = static_cast<const uint16_t*>(args.dy.data),
                                           .tokens = tokens,
                                           .hidden = hidden,
                                           .mode = args.mode,
                                           .dtable = args.dtable.as<float>(),
                                           .vocab = args.dtable.dim(0)},
                                          launch);
    const auto kernel = wide ? embedding_backward_kernel<Bf16Rows> : embedding_backward_kernel<AnyRows>;
    // a CTA takes several tiles of columns where that leaves enough CTAs to fill the device a few times
    const int64_t ranges = ceil_div(tokens, kPlaces), column_tiles = ceil_div(hidden, kGradColumns),
                  tiles_each = std::clamp<int64_t>(ranges * column_tiles / (int64_t{kNumSms} * 4 * kWaves), 1,
                                                   column_tiles),
                  splits = ceil_div(column_tiles, tiles_each), items = ranges * splits;
    const unsigned grid = grid_of_items(std::min(items, int64_t{1} << 30), launch);
    launch_pdl(kernel, grid, kGradThreads, launch, "embedding_backward", sorted_ids, order,
               device_view(args.dy), args.mode, args.dtable.as<float>(), args.dtable.dim(0), splits);
}

}  // namespace fp8flow
