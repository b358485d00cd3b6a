// SwiGLU on many wide BF16 rows: gate, up and da come through shared memory by the copy engine, ahead of the work, and sigmoids from a table
// beside them. Contract: kernels/ops/swiglu.h. Few rows, or others: swiglu.cu.
#include "kernels/hopper/swiglu_rows.h"

#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/sigmoid.h"

namespace fp8flow::hopper {

namespace {

constexpr int kLanes = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
// A lane takes two units at a time, 64 columns apart, and eight lanes a 1x128 block: 16-byte accesses of eight lanes are a whole line, in
// shared memory without bank conflicts.
constexpr int kUnits = 2, kBlockCols = static_cast<int>(kBlock), kBlockLanes = kBlockCols / kUnit / kUnits,
              kUnitStep = kBlockCols / kUnits;
constexpr int kStep = kLanes * kUnits * kUnit;  // columns of a warp at a time
constexpr int kPiece = 2 * kStep, kSlots = 2;   // columns of a copy, copies of a warp on their way or in use
constexpr int kPieceBytes = 2 * kPiece;         // of one input
constexpr int kForwardWarps = 24, kForwardInputs = 2, kBackwardWarps = 16, kBackwardInputs = 3;
constexpr int ring_bytes(int warps, int inputs) { return warps * kSlots * inputs * kPieceBytes; }

template <int kWarps> struct Shared {
    SigmoidTable table;
    Barrier full[kWarps][kSlots];
    int next_row, next_pad;  // of the CTA's: the first that no warp has taken
};
// The next of the CTA's rows or pads: warps run at different speeds, and in equal shares a fifth of them had nothing left to do, on average over
// the kernel. What comes out does not depend on who works on a row.
__device__ __forceinline__ int take(int* next) {
    int taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(next, 1);
    return __shfl_sync(kWholeWarp, taken, 0);
}

// This CTA's part of `total` rows of one kind: neighbours, and as many as any other CTA's, give or take one.
struct Share {
    int64_t first;
    int count;
    __device__ explicit Share(int64_t total) {
        first = total * blockIdx.x / gridDim.x;
        count = static_cast<int>(total * (blockIdx.x + int64_t{1}) / gridDim.x - first);
    }
};

// A piece of a row that has been requested; row < 0: there is none.
struct Piece {
    int row, col;
    float prob;
};

// What a warp reads, piece by piece: valid rows, of which it takes the CTA's next one whenever it has requested one to its end.
template <int kInputs> class Feed {
public:
    // First rows of the op; da and prob may be absent.
    struct Inputs {
        const uint16_t *h, *da;
        const float* prob;
        int width;
    };
    __device__ Feed(const Inputs& inputs, const DeviceGroups& groups, uint8_t* slots, Barrier* full,
                    int* next_row)
        : inputs_(inputs), rows_(groups), slots_(slots), full_(full), next_row_(next_row) {
        const Share share(rows_.total());
        count_ = share.count;
        if (count_ == 0) return;
        rows_.seek(share.first);
        take_row();
    }
    __device__ bool any_pads() const { return rows_.any_pads(); }
    __device__ const uint8_t* await(int slot, uint32_t parity) const {
        barrier_wait(&full_[slot], parity);
        return slots_ + slot * kSlotBytes;
    }
    // Starts the next piece's copies to a slot that all lanes have read; all but the probability's, which would be waited for.
    __device__ Piece request(int slot) {
        const Piece piece = {row_, col_, 1.0f};
        if (row_ < 0) return piece;
        if (threadIdx.x == 0) {
            const int width = inputs_.width;
            const uint32_t bytes = 2 * static_cast<uint32_t>(min(kPiece, width - col_));
            const int64_t at = int64_t{row_} * width + col_;
            const uint16_t* const gate = inputs_.h + at + int64_t{row_} * width;
            uint8_t* const to = slots_ + slot * kSlotBytes;
            barrier_arrive_expect_bytes(&full_[slot], kInputs * bytes);
            bulk_load(gate, &full_[slot], to, bytes);
            bulk_load(gate + width, &full_[slot], to + kPieceBytes, bytes);
            if constexpr (kInputs == kBackwardInputs)
                bulk_load(inputs_.da + at, &full_[slot], to + 2 * kPieceBytes, bytes);
        }
        col_ += kPiece;
        if (col_ >= inputs_.width) {
            col_ = 0;
            take_row();
        }
        return piece;
    }
    __device__ float prob_of(const Piece& piece) const {
        return piece.row >= 0 && inputs_.prob != nullptr ? inputs_.prob[piece.row] : 1.0f;
    }

private:
    static constexpr int kSlotBytes = kInputs * kPieceBytes;

    __device__ void take_row() {
        const int next = take(next_row_);
        row_ = next < count_ ? rows_.advance(next - index_) : -1;
        index_ = next;
    }

    Inputs inputs_;
    CountedRows<RowKind::valid> rows_;
    uint8_t* slots_;
    Barrier* full_;
    int* next_row_;
    int count_, index_ = 0;   // of the CTA's rows; where rows_ stands
    int row_ = -1, col_ = 0;  // what is requested next
};

// The barriers and the counters; all threads call it.
template <int kWarps> __device__ __forceinline__ void prepare(Shared<kWarps>& shared) {
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kSlots; ++slot) barrier_init(&shared.full[threadIdx.y][slot], 1);
        fence_barrier_init();
        if (threadIdx.y == 0) shared.next_row = shared.next_pad = 0;
    }
    __syncthreads();
}
template <int kWarps> __device__ __forceinline__ void fill_table(Shared<kWarps>& shared) {
    shared.table.fill(static_cast<int>(threadIdx.y) * kLanes + static_cast<int>(threadIdx.x),
                      kWarps * kLanes);
    __syncthreads();
}

// Calls clear(row) for every pad, warps of the CTA taking turns.
template <class Clear>
__device__ __forceinline__ void each_pad(const DeviceGroups& groups, int* next_pad, Clear clear) {
    CountedRows<RowKind::pad> pads(groups);
    const Share share(pads.total());
    if (share.count == 0) return;
    pads.seek(share.first);
    for (int index = 0, next; (next = take(next_pad)) < share.count; index = next)
        clear(pads.advance(next - index));
}
// The row's codes or values, and its scales if there are any.
__device__ __forceinline__ void clear_row(const RowView& t, int64_t row, const BlockScales& scales) {
    const int lane = static_cast<int>(threadIdx.x), size = scales.data != nullptr ? 1 : 2;
    uint8_t* const to = static_cast<uint8_t*>(t.data) + row * t.cols * size;
    for (int i = lane * 16; i < t.cols * size; i += kLanes * 16) *reinterpret_cast<uint4*>(to + i) = uint4{};
    if (scales.data == nullptr) return;
    for (int col = lane * kBlockCols; col < t.cols; col += kLanes * kBlockCols) *scales.at(row, col) = 0.0f;
}

// This lane's two units of one input, the first where `in` points to.
__device__ __forceinline__ void load_units(const uint8_t* in, uint4 (&units)[kUnits]) {
    const uint4* const at = reinterpret_cast<const uint4*>(in);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) units[u] = at[u * (kUnitStep / kUnit)];
}

// nullptr: 1 everywhere.
__device__ __forceinline__ const float* first_prob(const RowView& prob) {
    return prob ? static_cast<const float*>(prob.data) + prob.base() : nullptr;
}

__device__ __forceinline__ float magnitude_of(const float (&v)[kUnits][kUnit]) {
    float largest = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) largest = fmaxf(largest, fabsf(v[u][i]));  // NaN ignored
    return largest;
}
__device__ __forceinline__ float max_with(float value, int step) {
    return fmaxf(value, __shfl_xor_sync(kWholeWarp, value, step));
}

// The units that begin before the row's half ends, `left` columns behind the first.
__device__ __forceinline__ void store_values(const RowView& t, int64_t at, int left,
                                             const float (&v)[kUnits][kUnit]) {
    uint4* const out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.data) + at);
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
        if (u * kUnitStep < left)
            out[u * (kUnitStep / kUnit)] = {pack_bf16(v[u][0], v[u][1]), pack_bf16(v[u][2], v[u][3]),
                                            pack_bf16(v[u][4], v[u][5]), pack_bf16(v[u][6], v[u][7])};
}
// Blocks are whole.
template <DType kCodes>
__device__ __forceinline__ void store_codes(const RowView& t, int64_t at, const float (&v)[kUnits][kUnit],
                                            float multiplier) {
    uint2* const out = reinterpret_cast<uint2*>(static_cast<uint8_t*>(t.data) + at);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) out[u * (kUnitStep / kUnit)] = encode_unit(v[u], multiplier, kCodes);
}

// Moves 2F values in and F values (or codes and F/128 scales) out a row: 5.03 bytes a column, 0.082 ms at 32768 x 2048 and 4.1 TB/s. There
// is a CTA an SM; each has as many valid rows as any other, and as many pads, which it clears at the end. A warp works on one row at a
// time, 512 columns a step, 16 a lane, and has two pieces of 1024 columns of gate and up in shared memory: one that it works on, one on
// its way; as soon as a piece is in registers, its slot is asked for the next one: up to 192 KB an SM. (Requested into registers, 64 KB
// an SM at best and half of that on average, memory was at 83 %.)
// Barriers: a slot's, which completes when its bytes have come, one arrival a phase; warps share nothing else but the table (one
// __syncthreads) and the counters. A 128-column block belongs to eight lanes, whose maximum does not depend on the order:
// deterministic. Of what an SM has for 512 columns at 4.1 TB/s and 1.75 GHz, 580 turns to issue and 145 of its shared memory, it uses 337
// (SASS, codes; 16 columns a lane: 21 instructions a column) and 88 (56 of them the table's).
template <Output kOutput>
__global__ void __launch_bounds__(kForwardWarps* kLanes, 1) swiglu_rows_kernel(const SwigluForward args) {
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ Shared<kForwardWarps> shared;
    prepare(shared);
    const int width = args.a.cols, lane = static_cast<int>(threadIdx.x);
    const int lane_col = lane / kBlockLanes * kBlockCols + lane % kBlockLanes * kUnit;
    using Input = Feed<kForwardInputs>;
    Input input({.h = static_cast<const uint16_t*>(args.h.data) + args.h.base() * 2 * width,
                 .da = nullptr,
                 .prob = first_prob(args.prob),
                 .width = width},
                args.groups, ring + threadIdx.y * ring_bytes(1, kForwardInputs), shared.full[threadIdx.y],
                &shared.next_row);
    Piece piece = input.request(0), ahead = input.request(1);
    static_assert(kSlots == 2);
    piece.prob = input.prob_of(piece);
    ahead.prob = input.prob_of(ahead);
    fill_table(shared);

    const int64_t a_base = args.a.base();
    for (uint32_t turn = 0; piece.row >= 0; ++turn) {
        const int slot = static_cast<int>(turn % kSlots);
        const uint8_t* in = input.await(slot, turn / kSlots % 2) + 2 * lane_col;
        Piece requested = {};
        const int64_t row = a_base + piece.row;
        int64_t at = row * width + piece.col + lane_col;
        float* scale_at = kOutput == Output::values ? nullptr : args.scales.at(row, piece.col + lane_col);
        const int end = min(piece.col + kPiece, width);
#pragma unroll 1
        for (int step = piece.col; step < end; step += kStep) {
            const int left = width - lane_col - step;
            uint4 raw_gate[kUnits], raw_up[kUnits];
            load_units(in, raw_gate);
            load_units(in + kPieceBytes, raw_up);
            if (step + kStep >= end) {
                __syncwarp();
                requested = input.request(slot);
            }
            float a[kUnits][kUnit];
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                float gate[kUnit], up[kUnit], sigmoid[kUnit];
                unpack_unit(raw_gate[u], DType::bf16, gate);
                unpack_unit(raw_up[u], DType::bf16, up);
                shared.table.sigmoids(raw_gate[u], sigmoid);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) a[u][i] = gate[i] * sigmoid[i] * up[i] * piece.prob;
            }
            if constexpr (kOutput == Output::values) {
                store_values(args.a, at, left, a);
            } else {
                constexpr DType kCodes = codes_of(kOutput);
                const float amax = max_with(max_with(max_with(magnitude_of(a), 4), 2), 1);
                const QuantScale scale = quant_scale(amax, fp8_max(kCodes), args.scales.format);
                if (left > 0) {
                    store_codes<kCodes>(args.a, at, a, scale.multiplier);
                    if (lane % kBlockLanes == 0) *scale_at = scale.dequant;
                }
                scale_at += kStep / kBlockCols * args.scales.pitch;
            }
            at += kStep;
            in += 2 * kStep;
        }
        piece = ahead;
        ahead = requested;
        ahead.prob = input.prob_of(ahead);  // waited for a turn later
    }
    if (!input.any_pads()) return;
    each_pad(args.groups, &shared.next_pad, [&](int row) { clear_row(args.a, a_base + row, args.scales); });
}

// The sum of a block's 16 units, of which a lane holds the sums of two: neighbours first, then pairs, and so on; the same in all eight
// lanes. The lower halves of the block are added up in even lanes while the upper halves are in odd ones.
__device__ __forceinline__ float sum_over_block(const float (&units)[kUnits]) {
    const bool odd = threadIdx.x % 2 != 0;
    float sum = odd ? units[1] : units[0];
    sum += __shfl_xor_sync(kWholeWarp, odd ? units[0] : units[1], 1);
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    sum += __shfl_xor_sync(kWholeWarp, sum, 4);
    return sum + __shfl_xor_sync(kWholeWarp, sum, 1);
}

// Moves 3F values in and 2F values (or codes and scales) out a row: 8.06 bytes a column, 0.132 ms at 32768 x 2048 and 4.1 TB/s. Rows, slots and
// barriers as in swiglu_rows_kernel: 192 KB an SM. dprob: a lane's units, the block's eight lanes, the row's blocks in ascending
// order, all inside the warp: the sum knows nothing of the grid. Pads: zeros.
// Of 930 turns to issue and 232 of shared memory it uses 570 and 104. The maxima of gate and up are found together: even lanes end with
// gate's and odd ones with up's, make that scale, and exchange multipliers.
template <Output kOutput>
__global__ void __launch_bounds__(kBackwardWarps* kLanes, 1)
    swiglu_backward_rows_kernel(const SwigluGradient args) {
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ Shared<kBackwardWarps> shared;
    prepare(shared);
    const int width = args.da.cols, lane = static_cast<int>(threadIdx.x);
    const int lane_col = lane / kBlockLanes * kBlockCols + lane % kBlockLanes * kUnit;
    using Input = Feed<kBackwardInputs>;
    Input input({.h = static_cast<const uint16_t*>(args.h.data) + args.h.base() * 2 * width,
                 .da = static_cast<const uint16_t*>(args.da.data) + args.da.base() * width,
                 .prob = first_prob(args.prob),
                 .width = width},
                args.groups, ring + threadIdx.y * ring_bytes(1, kBackwardInputs), shared.full[threadIdx.y],
                &shared.next_row);
    Piece piece = input.request(0), ahead = input.request(1);
    static_assert(kSlots == 2);
    piece.prob = input.prob_of(piece);
    ahead.prob = input.prob_of(ahead);
    fill_table(shared);

    const int64_t dh_base = args.dh.base();
    float* const dprob = args.dprob ? static_cast<float*>(args.dprob.data) + args.dprob.base() : nullptr;
    const bool odd = lane % 2 != 0;
    float sum = 0.0f;  // of the row, so far
    for (uint32_t turn = 0; piece.row >= 0; ++turn) {
        const int slot = static_cast<int>(turn % kSlots);
        const uint8_t* in = input.await(slot, turn / kSlots % 2) + 2 * lane_col;
        Piece requested = {};
        const int64_t row = dh_base + piece.row;
        int64_t at = row * 2 * width + piece.col + lane_col;
        float* scale_at = kOutput == Output::values
                              ? nullptr
                              : args.scales.at(row, (odd ? width : 0) + piece.col + lane_col);
        const int end = min(piece.col + kPiece, width);
        if (piece.col == 0) sum = 0.0f;
#pragma unroll 1
        for (int step = piece.col; step < end; step += kStep) {
            const int left = width - lane_col - step;
            uint4 raw_gate[kUnits], raw_up[kUnits], raw_da[kUnits];
            load_units(in, raw_gate);
            load_units(in + kPieceBytes, raw_up);
            load_units(in + 2 * kPieceBytes, raw_da);
            if (step + kStep >= end) {
                __syncwarp();
                requested = input.request(slot);
            }
            float dgate[kUnits][kUnit], dup[kUnits][kUnit], sums[kUnits];
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
                float gate[kUnit], up[kUnit], da[kUnit], sigmoids[kUnit], unit_sum = 0.0f;
                unpack_unit(raw_gate[u], DType::bf16, gate);
                unpack_unit(raw_up[u], DType::bf16, up);
                unpack_unit(raw_da[u], DType::bf16, da);
                shared.table.sigmoids(raw_gate[u], sigmoids);
#pragma unroll
                for (int i = 0; i < kUnit; ++i) {
                    const float sigmoid = sigmoids[i], silu = gate[i] * sigmoid, da_prob = da[i] * piece.prob;
                    unit_sum = fma_float(da[i], silu * up[i], unit_sum);
                    dgate[u][i] = da_prob * up[i] * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
                    dup[u][i] = da_prob * silu;
                }
                sums[u] = u * kUnitStep < left ? unit_sum : 0.0f;
            }
            if constexpr (kOutput == Output::values) {
                store_values(args.dh, at, left, dgate);
                store_values(args.dh, at + width, left, dup);
            } else {  // width is a multiple of 128: no block has both halves
                constexpr DType kCodes = codes_of(kOutput);
                const float of_gate = magnitude_of(dgate), of_up = magnitude_of(dup);
                float amax =
                    fmaxf(odd ? of_up : of_gate, __shfl_xor_sync(kWholeWarp, odd ? of_gate : of_up, 1));
                amax = max_with(max_with(amax, 2), 4);
                const QuantScale scale = quant_scale(amax, fp8_max(kCodes), args.scales.format);
                const float other = __shfl_xor_sync(kWholeWarp, scale.multiplier, 1);
                if (left > 0) {
                    store_codes<kCodes>(args.dh, at, dgate, odd ? other : scale.multiplier);
                    store_codes<kCodes>(args.dh, at + width, dup, odd ? scale.multiplier : other);
                    if (lane % kBlockLanes < 2) *scale_at = scale.dequant;
                }
                scale_at += kStep / kBlockCols * args.scales.pitch;
            }
            at += kStep;
            in += 2 * kStep;
            if (dprob == nullptr) continue;
            const float block = sum_over_block(sums);
#pragma unroll
            for (int first = 0; first < kLanes; first += kBlockLanes)
                sum += __shfl_sync(kWholeWarp, block, first);  // +0 behind the row's last block
        }
        if (dprob != nullptr && end == width && lane == 0) dprob[piece.row] = sum;
        piece = ahead;
        ahead = requested;
        ahead.prob = input.prob_of(ahead);  // waited for a turn later
    }
    if (!input.any_pads()) return;
    each_pad(args.groups, &shared.next_pad, [&](int row) {
        clear_row(args.dh, dh_base + row, args.scales);
        if (dprob != nullptr && lane == 0) dprob[row] = 0.0f;
    });
}

template <class Kernel, class Args>
void run(Kernel kernel, int warps, int inputs, const Args& args, int64_t rows, const Launch& launch,
         const char* op) {
    const int bytes = ring_bytes(warps, inputs);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    kernel<<<grid_for(rows, launch, 1), dim3(kLanes, static_cast<unsigned>(warps)),
             static_cast<std::size_t>(bytes), stream_of(launch)>>>(args);
    check_launch(op);
}

}  // namespace

void launch_swiglu_rows(const SwigluForward& args, Output output, int64_t rows, const Launch& launch) {
    const auto kernel = output == Output::values ? swiglu_rows_kernel<Output::values>
                        : output == Output::e4m3 ? swiglu_rows_kernel<Output::e4m3>
                                                 : swiglu_rows_kernel<Output::e5m2>;
    run(kernel, kForwardWarps, kForwardInputs, args, rows, launch, "swiglu");
}

void launch_swiglu_backward_rows(const SwigluGradient& args, Output output, int64_t rows,
                                 const Launch& launch) {
    const auto kernel = output == Output::values ? swiglu_backward_rows_kernel<Output::values>
                        : output == Output::e4m3 ? swiglu_backward_rows_kernel<Output::e4m3>
                                                 : swiglu_backward_rows_kernel<Output::e5m2>;
    run(kernel, kBackwardWarps, kBackwardInputs, args, rows, launch, "swiglu_backward");
}

}  // namespace fp8flow::hopper
