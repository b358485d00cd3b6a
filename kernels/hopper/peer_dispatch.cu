// dispatch over peer memory: every rank shows its rows in its own box, and after one meeting, a first part of them before it, pulls each
// distinct row that its experts need once from the owner and writes it to all its places. The bytes are those of the reference
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
    int64_t progress;    // PeerGroup::progress
    uint32_t* arrivals;  // at each step
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

constexpr int kPublishSteps = 8;  // the first is the part that is pulled early
static_assert(kPublishSteps <= kPeerSteps);

// The same in the order of tokens, an eighth of them at a time; the last warp that is through with a step tells everybody: each warp's bytes are
// stored before its fence, the fences come before the arrivals that the last warp has counted, and these before its release. No
// barriers, nobody waits, one writer a byte.
__global__ __launch_bounds__(kPeerThreads) void publish_in_steps_kernel(const PublishArgs args) {
    const PeerGroup& group = args.group;
    if (__any_sync(0xFFFFFFFFu, group.lost())) return;
    const WireRows& rows = args.rows;
    const int lane = static_cast<int>(threadIdx.x) % kPeerWarp;
    const uint64_t epoch = group.epoch() + 1;
    const auto warps = static_cast<uint32_t>(grid_threads() / kPeerWarp);
    uint8_t* box = group.next_box(group.rank);
    for (int step = 0; step < kPublishSteps; ++step) {
        const int64_t first = args.tokens * step / kPublishSteps,
                      end = args.tokens * (step + 1) / kPublishSteps;
        const auto copy = [&](uint8_t* to, const uint8_t* from, int64_t bytes) {
            copy_contiguous(to + first * bytes, from + first * bytes, (end - first) * bytes, grid_thread(),
                            grid_threads());
        };
        copy(box, rows.codes, rows.row_bytes);
        if (rows.blocks > 0) copy(box + rows.scale_offset, rows.scales, rows.scale_bytes);
        __syncwarp();
        int is_last = 0;
        if (lane == 0) {
            __threadfence_system();
            is_last = atomicAdd(args.arrivals + step, 1u) + 1 == warps ? 1 : 0;
            if (is_last != 0) {
                args.arrivals[step] = 0;  // for the next call
                __threadfence_system();
            }
        }
        is_last = __shfl_sync(0xFFFFFFFFu, is_last, 0);
        if (is_last != 0 && lane < group.size)
            store_release_system(group.progress(args.progress, lane, group.rank) + step,
                                 peer_progress(epoch, end));
        __syncwarp();
    }
}

struct PullArgs {
    PeerGroup group;
    WireRows rows;
    ReceivedRows received;
    const int32_t* recv_rows;  // [., topk]; null: received row i becomes row i of dst
    int64_t topk;
    const int64_t* send_counts;
    enum class Box { current, early } box;
    bool last_part;  // which zeroes the pads and counts what was sent
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
    const uint8_t* box =
        args.box == PullArgs::Box::early ? args.group.early_box(from) : args.group.current_box(from);
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
    const int64_t warps = grid_threads() / kPeerWarp, pads = args.recv_rows != nullptr && args.last_part
                                                                 ? args.groups.num_groups * args.alignment
                                                                 : 0;
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
    if (grid_thread() != 0 || !args.last_part) return;
    int64_t sent = 0;
    for (int r = 0; r < group.size; ++r)
        if (r != group.rank) sent += args.send_counts[r];
    count_wire(&group.words->wire[1], sent * (args.rows.row_bytes + args.rows.scale_bytes));
}

constexpr ReceivedRows::Part kWhole{}, kEarly{0, 1};
// With fewer slots there is little to hide, and few multiprocessors cannot pull at the wire's rate by halves.
constexpr int64_t kLeastSlotsToOverlap = 1024;
constexpr int kLeastSmsToOverlap = 64;

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
                  .received = {plan.recv_offsets.as<int64_t>(), plan.recv_source.as<int32_t>(), slots, {}},
                  .recv_rows = fan_out ? plan.recv_rows.as<int32_t>() : nullptr,
                  .topk = plan.topk,
                  .send_counts = plan.send_counts.as<int64_t>(),
                  .box = PullArgs::Box::current,
                  .last_part = true,
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
    const auto pull = [&](ReceivedRows::Part part, PullArgs::Box box, const Launch& where) {
        PullArgs some = args;
        some.received.part = part;
        some.box = box;
        some.last_part = part.end == kWhole.end;
        pull_rows_kernel<<<grid_for(ceil_div(size() * slots, kPullWarps), where, 1), kPullThreads, 0,
                           stream_of(where)>>>(some);
        check_launch("pulling rows from peers");
    };
    if (size() == 1) return pull(kWhole, PullArgs::Box::current, launch);
    const PublishArgs publish{group, wire, plan.num_tokens, layout_.progress, words_->arrivals};
    const auto publish_grid = [&](const Launch& where) {
        return peer_grid(ceil_div(plan.num_tokens * row_bytes, kPeerVector * kPeerWarp), where);
    };
    const int sms = launch.sm_limit > 0 ? std::min(launch.sm_limit, kNumSms) : kNumSms;
    if (slots < kLeastSlotsToOverlap || sms < kLeastSmsToOverlap || !args.vectorised) {
        publish_rows_kernel<<<publish_grid(launch), kPeerThreads, 0, stream>>>(publish);
        check_launch("showing rows to peers");
        meet(kExpertParallel, PeerOperation::dispatch, launch);
        return pull(kWhole, PullArgs::Box::current, launch);
    }

    // The second stream shows all rows, meets and pulls seven eighths of them; this one pulls the first as soon as all show it. Both read the
    // box of early_epoch, which is set before the meeting moves the epoch on.
    const Launch first{.stream = launch.stream, .sm_limit = sms - sms / 2},
        second{.stream = {side_stream_}, .sm_limit = sms / 2};
    wait_for(side_stream_, forked_, stream);
    publish_in_steps_kernel<<<publish_grid(second), kPeerThreads, 0, side_stream_>>>(publish);
    check_launch("showing rows to peers");
    args.received.part = kEarly;
    launch_rows_wait(meeting_of(kExpertParallel, PeerOperation::dispatch), layout_.progress, args.received,
                     launch);
    wait_for(side_stream_, begun_, stream);
    pull(kEarly, PullArgs::Box::early, first);
    meet(kExpertParallel, PeerOperation::dispatch, second);
    // unless that is more than allowed, with all multiprocessors: half of its CTAs begin when the first part is there
    pull({kEarly.end, kWhole.end}, PullArgs::Box::early,
         {.stream = second.stream, .sm_limit = launch.sm_limit > 0 ? second.sm_limit : 0});
    wait_for(stream, joined_, side_stream_);
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
