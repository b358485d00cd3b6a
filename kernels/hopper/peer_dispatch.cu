// dispatch over peer memory: every rank shows its rows in its own box and after one meeting pulls each distinct row
// that its experts need once from the owner and writes it to all its places. The bytes are those of the reference
// exchange followed by permute_pad.
#include "kernels/hopper/device/peer.h"
#include "kernels/hopper/peer_exchange.h"

namespace fp8flow {

using namespace hopper;

namespace {

// Rows as they travel. In a box: the codes (or plain elements) of all slots, then the scales.
struct WireRows {
    const uint8_t* codes;  // of this rank's rows, where the caller has them
    const uint8_t* scales;
    int64_t row_bytes, scale_bytes;  // of one row
    int64_t scale_offset;            // in a box
    int64_t blocks;                  // scales a row
    DType scale_dtype;
};

struct PublishArgs {
    PeerGroup group;
    WireRows rows;
    int64_t tokens;
};

// Moves: this rank's rows in and out once, all of it local. No barriers, one writer a byte.
__global__ __launch_bounds__(kPeerThreads) void publish_rows_kernel(const PublishArgs args) {
    if (args.group.lost()) return;
    const WireRows& rows = args.rows;
    uint8_t* box = args.group.next_box(args.group.rank);
    copy_contiguous(box, rows.codes, args.tokens * rows.row_bytes, grid_thread(), grid_threads());
    copy_contiguous(box + rows.scale_offset, rows.scales, args.tokens * rows.scale_bytes, grid_thread(),
                    grid_threads());
}

struct PullArgs {
    PeerGroup group;
    WireRows rows;
    ReceivedRows received;
    const int32_t* recv_rows;  // [., topk]; null: received row i becomes row i of dst
    int64_t topk;
    const int64_t* send_counts;
    DeviceView dst;
    bool vectorised;
    void* dst_scales;
    DType dst_scale_dtype;
    int64_t dst_row_stride, dst_block_stride;  // elements
    DeviceGroups groups;                       // with recv_rows: whose pads are zeroed
    int64_t alignment;
};

constexpr int kPullThreads = 512, kPullWarps = kPullThreads / kPeerWarp;
constexpr int kPiecesHeld = 14;  // 16 bytes each, of a thread: a row of 7168 bytes in one go
constexpr int kScalesHeld = 2;   // a thread; rows of up to 8192 columns need no second look

__device__ __forceinline__ void store_scale(const PullArgs& args, int64_t row, int64_t block, float scale) {
    const int64_t at = row * args.dst_row_stride + block * args.dst_block_stride;
    if (args.dst_scale_dtype == DType::e8m0)
        static_cast<uint8_t*>(args.dst_scales)[at] = float_to_e8m0(scale);  // back to the byte it was
    else
        static_cast<float*>(args.dst_scales)[at] = scale;
}

// Past L1, which may hold a line from before a neighbour's scales were there.
__device__ __forceinline__ float load_scale(const uint8_t* scales, DType dtype, int64_t block) {
    return dtype == DType::e8m0 ? e8m0_to_float(__ldcg(scales + block))
                                : __ldcg(reinterpret_cast<const float*>(scales) + block);
}

// Received row i: one load of every byte, as many stores as the row has places. By one warp.
__device__ __forceinline__ void pull_row(const PullArgs& args, int64_t i, int from, int64_t token,
                                         int64_t base) {
    const WireRows& rows = args.rows;
    const int lane = static_cast<int>(threadIdx.x) % kPeerWarp;
    const bool own = from == args.group.rank;
    const uint8_t* box = args.group.current_box(from);
    const uint8_t* codes = (own ? rows.codes : box) + token * rows.row_bytes;
    const uint8_t* scales = (own ? rows.scales : box + rows.scale_offset) + token * rows.scale_bytes;
    // in lane k the k-th place, under way with the row; the whole warp calls for_each_place
    const bool listed = args.recv_rows != nullptr;
    const int32_t place = listed && lane < args.topk ? args.recv_rows[i * args.topk + lane] : -1;
    const auto for_each_place = [&](auto visit) {
        if (!listed) return visit(base + i);
        const int places = __popc(__ballot_sync(0xFFFFFFFFu, place >= 0));
        for (int k = 0; k < places; ++k) visit(base + __shfl_sync(0xFFFFFFFFu, place, k));
    };

    float held[kScalesHeld] = {};
#pragma unroll
    for (int j = 0; j < kScalesHeld; ++j)
        if (const int64_t block = lane + j * kPeerWarp; block < rows.blocks)
            held[j] = load_scale(scales, rows.scale_dtype, block);

    uint8_t* dst = static_cast<uint8_t*>(args.dst.data);
    if (args.vectorised) {
        const int count = static_cast<int>(rows.row_bytes / kPeerVector);
        const uint4* in = reinterpret_cast<const uint4*>(codes);
        for (int begin = 0; begin < count; begin += kPiecesHeld * kPeerWarp) {
            const int first = begin + lane;
            uint4 piece[kPiecesHeld] = {};
#pragma unroll
            for (int j = 0; j < kPiecesHeld; ++j)
                if (first + j * kPeerWarp < count) piece[j] = __ldcg(in + first + j * kPeerWarp);
            for_each_place([&](int64_t row) {
                uint4* out = reinterpret_cast<uint4*>(dst + row * rows.row_bytes);
#pragma unroll
                for (int j = 0; j < kPiecesHeld; ++j)
                    if (first + j * kPeerWarp < count) out[first + j * kPeerWarp] = piece[j];
            });
        }
    } else {
        for (int64_t begin = 0; begin < rows.row_bytes; begin += kPeerWarp) {
            const int64_t at = begin + lane;
            const uint8_t byte = at < rows.row_bytes ? codes[at] : uint8_t{0};
            for_each_place([&](int64_t row) {
                if (at < rows.row_bytes) dst[row * rows.row_bytes + at] = byte;
            });
        }
    }

    if (rows.blocks == 0) return;
    for_each_place([&](int64_t row) {
#pragma unroll
        for (int j = 0; j < kScalesHeld; ++j)
            if (const int64_t block = lane + j * kPeerWarp; block < rows.blocks)
                store_scale(args, row, block, held[j]);
        for (int64_t block = lane + kScalesHeld * kPeerWarp; block < rows.blocks; block += kPeerWarp)
            store_scale(args, row, block, load_scale(scales, rows.scale_dtype, block));
    });
}

// A pad: zero codes and zero scales. By one warp.
__device__ __forceinline__ void zero_row(const PullArgs& args, int64_t row) {
    const WireRows& rows = args.rows;
    const int lane = static_cast<int>(threadIdx.x) % kPeerWarp;
    uint8_t* to = static_cast<uint8_t*>(args.dst.data) + row * rows.row_bytes;
    if (args.vectorised) {
        for (int64_t at = lane; at < rows.row_bytes / kPeerVector; at += kPeerWarp)
            reinterpret_cast<uint4*>(to)[at] = make_uint4(0, 0, 0, 0);
    } else {
        for (int64_t at = lane; at < rows.row_bytes; at += kPeerWarp) to[at] = 0;
    }
    for (int64_t block = lane; block < rows.blocks; block += kPeerWarp) store_scale(args, row, block, 0.0f);
}

// Moves: every distinct remote row once over NVLink, every local one once, and every M-row out. Ceiling: loads from three peers while all
// GPUs load, 332 GB/s on H200s, which takes about 0.7 MB under way; here 112 KB a CTA. A warp takes a row, all of it in flight, and stores
// it to all its places; rows of all sources are dealt out evenly, so that no link waits for another. Scales go to their
// transposed places four bytes at a time (L2 gathers the sectors). Behind each row a warp zeroes a pad, while the wire is what others wait
// for. Copies only, one writer a byte.
__global__ __launch_bounds__(kPullThreads, 1) void pull_rows_kernel(const PullArgs args) {
    const PeerGroup& group = args.group;
    if (__any_sync(0xFFFFFFFFu, group.lost())) return;
    const int64_t base = args.dst.base();
    // the (n % alignment)-th pad of group n / alignment
    const int64_t warps = grid_threads() / kPeerWarp,
                  pads = args.recv_rows != nullptr ? args.groups.num_groups * args.alignment : 0;
    int64_t pad = grid_thread() / kPeerWarp;
    const auto zero_next_pad = [&] {
        if (pad >= pads) return;
        const int64_t g = pad / args.alignment;
        for (int64_t row = args.groups.offset(g) + args.groups.count(g) + pad % args.alignment;
             row < args.groups.offset(g + 1); row += args.alignment)
            zero_row(args, base + row);
        pad += warps;
    };
    args.received.deal(group.rank, group.size, [&](int64_t i, int from, int64_t token) {
        pull_row(args, i, from, token, base);
        zero_next_pad();
    });
    while (pad < pads) zero_next_pad();
    if (grid_thread() != 0) return;
    int64_t sent = 0;
    for (int r = 0; r < group.size; ++r)
        if (r != group.rank) sent += args.send_counts[r];
    count_wire(&group.words->wire[1], sent * (args.rows.row_bytes + args.rows.scale_bytes));
}

}  // namespace

void PeerExchange::pull(const Fp8Tensor& rows, const DispatchPlan& plan, const Fp8Tensor& dst,
                        RowTarget target, const Launch& launch) {
    last_stream_ = launch.stream;
    const int64_t slots = plan.all_ids.dim(1), row_bytes = rows.codes.cols() * size_of(rows.codes.dtype);
    if (row_bytes == 0) return;
    const bool scaled = rows.layout != ScaleLayout::none, fan_out = target == RowTarget::experts;
    const WireRows wire{.codes = rows.codes.bytes_ptr(),
                        .scales = scaled ? rows.scales.bytes_ptr() : nullptr,
                        .row_bytes = row_bytes,
                        .scale_bytes = scaled ? rows.scales.cols() * size_of(rows.scales.dtype) : 0,
                        .scale_offset = peer_aligned(slots * row_bytes),
                        .blocks = scaled ? rows.scales.cols() : 0,
                        .scale_dtype = scaled ? rows.scales.dtype : DType::f32};
    check_fits(wire.scale_offset + slots * wire.scale_bytes, "a dispatch");
    const PeerGroup& group = device_groups_[kExpertParallel];
    const cudaStream_t stream = stream_of(launch);
    const bool aligned =
        (reinterpret_cast<uintptr_t>(wire.codes) | reinterpret_cast<uintptr_t>(dst.codes.data)) %
            kPeerVector ==
        0;
    PullArgs args{.group = group,
                  .rows = wire,
                  .received = {plan.recv_offsets.as<int64_t>(), plan.recv_source.as<int32_t>(), slots},
                  .recv_rows = fan_out ? plan.recv_rows.as<int32_t>() : nullptr,
                  .topk = plan.topk,
                  .send_counts = plan.send_counts.as<int64_t>(),
                  .dst = device_view(dst.codes),
                  .vectorised = row_bytes % kPeerVector == 0 && aligned,
                  .dst_scales = nullptr,
                  .dst_scale_dtype = DType::f32,
                  .dst_row_stride = 0,
                  .dst_block_stride = 0,
                  .groups = device_groups(plan.groups, plan.groups.row_capacity),
                  .alignment = plan.groups.alignment};
    if (scaled) {
        args.dst_scales = dst.scales.data;
        args.dst_scale_dtype = dst.scales.dtype;
        args.dst_row_stride = fan_out ? 1 : wire.blocks;
        args.dst_block_stride = fan_out ? dst.scales.dim(1) : 1;
    }
    if (size() > 1) {
        publish_rows_kernel<<<peer_grid(ceil_div(plan.num_tokens * row_bytes, kPeerVector * kPeerWarp),
                                        launch),
                              kPeerThreads, 0, stream>>>({group, wire, plan.num_tokens});
        check_launch("showing rows to peers");
        meet(kExpertParallel, PeerOperation::dispatch, launch);
    }
    pull_rows_kernel<<<grid_for(ceil_div(size() * slots, kPullWarps), launch, 1), kPullThreads, 0, stream>>>(
        args);
    check_launch("pulling rows from peers");
}

void PeerExchange::do_dispatch(const Fp8Tensor& rows, const DispatchPlan& plan, const Fp8Tensor& dst, Arena&,
                               const Launch& launch) {
    pull(rows, plan, dst, RowTarget::experts, launch);
}

void PeerExchange::do_dispatch_rows(const Fp8Tensor& rows, const DispatchPlan& plan,
                                    const Fp8Tensor& received, Arena&, const Launch& launch) {
    pull(rows, plan, received, RowTarget::received, launch);
}

}  // namespace fp8flow
