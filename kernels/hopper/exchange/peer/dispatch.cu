// SPDX-License-Identifier: MIT
// dispatch over peer memory: every rank stores each row once into the receive buffer of every rank that needs
// it, and that rank copies it to all its rows of dst. The bytes are those of the reference exchange followed
// by permute_pad.
//
// Protocol. One kernel sends and receives at the same time, without a group barrier before it. A rank that
// starts call n + 1 no longer needs the receive buffers of call n - 1. It signals this, after its scales, in
// its flag line of the group barrier. No rank ends the call before all have signalled. Each row has its own
// flag and is received as soon as the flag is set. No warp polls longer than kSpinLimit: the remaining rows
// are deferred to a kernel of one CTA that waits until the deadline, and a second one that copies them. So a
// late peer does not occupy SMs.
#include "kernels/hopper/exchange/peer/dispatch.h"

#include "kernels/core/error.h"
#include "kernels/core/scaled_tensor.h"
#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/device/groups.h"
#include "kernels/hopper/device/mbarrier.h"
#include "kernels/hopper/device/pdl.h"
#include "kernels/hopper/device/tma.h"
#include "kernels/hopper/device/view.h"
#include "kernels/hopper/device/warp.h"
#include "kernels/hopper/exchange/peer/peer_exchange.h"
#include "kernels/hopper/runtime/launch.h"

#include <algorithm>

namespace fp8flow::hopper::peer {

namespace {

constexpr int kWarps = 10;             // of a CTA
constexpr int kMostSenders = 16;       // sender CTAs; more do not send faster
constexpr int kRing = 3;               // stages of a warp's ring
constexpr int kSendsPending = 1;       // stores to peers that may be pending when the next load is issued
constexpr int kReadsPending = 1;       // stages that stores may still read when the next load is issued
constexpr int64_t kPieceBytes = 7424;  // at most
constexpr int kMostBundled = 8;        // rows of a bundle, at most
constexpr int64_t kPieceAlign = 128;
constexpr uint64_t kSpinLimit = 300'000;  // nanoseconds

// A warp's ring of row pieces in shared memory. A row is args.pieces consecutive pieces, so piece n is piece
// n % pieces of its row.
struct Ring {
    uint8_t* slots;
    Mbarrier* arrived;  // [kRing]
    int32_t* targets;   // [kRing, 32]: where each piece goes
    int pieces, piece_bytes, stage_bytes;
    int64_t row_bytes;
    uint32_t issued = 0, done = 0;

    __device__ Ring(const DispatchArgs& args, uint8_t* slots, Mbarrier* arrived, int32_t* targets)
        : slots(slots),
          arrived(arrived),
          targets(targets),
          pieces(args.pieces),
          piece_bytes(args.piece_bytes),
          stage_bytes(args.stage_bytes),
          row_bytes(args.rows.row_bytes) {
        if (threadIdx.x % kWarpSize == 0) {
            for (int i = 0; i < kRing; ++i) mbarrier_init(arrived + i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    __device__ int32_t* target(uint32_t number) const { return targets + number % kRing * kWarpSize; }
    // Offset in its row.
    __device__ int64_t offset(uint32_t number) const {
        return int64_t{number % static_cast<uint32_t>(pieces)} * piece_bytes;
    }
    __device__ uint32_t bytes(uint32_t number) const {
        return static_cast<uint32_t>(min(int64_t{piece_bytes}, row_bytes - offset(number)));
    }
    __device__ bool ends_row(uint32_t number) const {
        return number % static_cast<uint32_t>(pieces) == static_cast<uint32_t>(pieces) - 1;
    }
    __device__ uint8_t* slot(uint32_t number) const { return slots + number % kRing * stage_bytes; }
    // Issues the load of the next piece of the row at `row`; called by one thread.
    __device__ void issue(const uint8_t* row) const {
        Mbarrier* barrier = arrived + issued % kRing;
        mbarrier_arrive_expect_tx(barrier, bytes(issued));
        bulk_load(row + offset(issued), barrier, slot(issued), bytes(issued));
    }
    // The same for a bundle of whole rows, those of tokens[0, count).
    template <int kMost>
    __device__ void issue_bundle(const uint8_t* rows, const int32_t (&tokens)[kMost], int count) const {
        Mbarrier* barrier = arrived + issued % kRing;
        const uint32_t row = static_cast<uint32_t>(row_bytes);
        mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(count) * row);
#pragma unroll
        for (int k = 0; k < kMost; ++k)
            if (k < count) bulk_load(rows + tokens[k] * row_bytes, barrier, slot(issued) + k * row, row);
    }
    __device__ void wait_for_oldest() const { mbarrier_wait(arrived + done % kRing, done / kRing & 1); }
    // Stores the oldest piece into the row at `row`, or a bundle of `rows` rows; part of the thread's current
    // bulk group. Stores to dst are evict-first, so that receive buffers stay in L2 until they are read.
    __device__ void store_to_peer(uint8_t* row, int rows) const {
        bulk_store(row + offset(done), slot(done),
                   rows == 1 ? bytes(done) : static_cast<uint32_t>(rows * row_bytes));
    }
    __device__ void store_to_dst(uint8_t* row) const {
        bulk_store_evict_first(row + offset(done), slot(done), bytes(done));
    }
};

// The bundles of rows that this rank sends. Each sender starts with one bundle and claims the others one by
// one from a counter, so that they are sent in order even if a sender is slow. Used by one thread.
struct SentRows {
    const DispatchArgs& args;
    int64_t items;
    uint32_t senders, following;  // following: number of the next bundle
    bool exists = true;
    DispatchArgs::Item row{0, 0};

    __device__ SentRows(const DispatchArgs& args, int64_t sender, int64_t senders)
        : args(args),
          items(args.sent_items()),
          senders(static_cast<uint32_t>(senders)),
          following(static_cast<uint32_t>(sender)) {
        next();
    }
    __device__ void next() {
        do {
            exists = following < items;
            if (!exists) return;
            row = args.sent_item(following);
            following = claim();
        } while (!args.is_sent(row));
    }

private:
    __device__ uint32_t claim() const {
        return senders + atomicAdd(&args.group().words->claimed_bundles, 1u);
    }
};

// Bundles that the senders of a CTA have sent, by sender, for the warp that signals their rows.
struct SentLog {
    static constexpr uint32_t kLength = 8;  // a sender may be so many bundles ahead of the signals
    volatile uint32_t sent[kWarps], signalled[kWarps], ended[kWarps];
    volatile int32_t rank[kWarps][kLength], number[kWarps][kLength], rows[kWarps][kLength];
};

// Sends this rank's rows to the receive buffers of the ranks that need them. Called by one thread, sender
// number `sender` of the log. A piece takes more than 1 us, whatever its size, so short rows are sent in
// bundles: with four ranks, rows of 1 KiB take 68 us instead of 122, rows of 2 KiB 93 us instead of 125.
template <int kMost>
__device__ __forceinline__ void send_rows(const DispatchArgs& args, uint64_t epoch, Ring& ring, SentRows rows,
                                          SentLog& log, int sender) {
    const PeerGroup& group = args.group();
    enum { kTo, kNumber, kRows };  // of a target
    uint32_t arrived = 0, sent = 0;
    const auto count_oldest = [&] {
        const int32_t* target = ring.target(arrived);
        if (!ring.ends_row(arrived++)) return;
        while (sent - log.signalled[sender] >= SentLog::kLength) {
        }
        log.rank[sender][sent % SentLog::kLength] = target[kTo];
        log.number[sender][sent % SentLog::kLength] = target[kNumber];
        log.rows[sender][sent % SentLog::kLength] = target[kRows];
        __threadfence_block();
        log.sent[sender] = ++sent;
    };
    int32_t tokens[kMost];
    int bundled = 0;
    const auto load_tokens = [&] {
        if (!rows.exists) return;
        bundled = kMost == 1 ? 1 : args.bundled_rows(rows.row);
#pragma unroll
        for (int k = 0; k < kMost; ++k)
            if (k < bundled) tokens[k] = args.sent_token(rows.row, k);
    };
    load_tokens();
    while (true) {
        while (rows.exists && ring.issued - arrived < kRing) {
            int32_t* target = ring.target(ring.issued);
            target[kTo] = rows.row.rank;
            target[kNumber] = static_cast<int32_t>(rows.row.n);
            target[kRows] = bundled;
            if constexpr (kMost == 1)
                ring.issue(args.rows.data + tokens[0] * args.rows.row_bytes);
            else
                ring.issue_bundle(args.rows.data, tokens, bundled);
            if (!ring.ends_row(ring.issued++)) continue;
            rows.next();
            load_tokens();  // in flight meanwhile
        }
        if (ring.done == ring.issued) break;
        const int32_t* target = ring.target(ring.done);
        ring.wait_for_oldest();
        ring.store_to_peer(args.rows.data_in(group.buffer(target[kTo], epoch), group.rank, target[kNumber]),
                           target[kRows]);
        bulk_commit();
        ++ring.done;
        if (ring.done - arrived <= kSendsPending) continue;
        bulk_wait<kSendsPending>();
        count_oldest();
    }
    bulk_wait<0>();
    while (arrived != ring.done) count_oldest();
    __threadfence_block();
    log.ended[sender] = 1;
}

// Stores the flags of the rows that the CTA's senders have sent. Lane k serves sender k. A fence waits for
// earlier flags, so senders must not execute one. Called by one warp.
__device__ __forceinline__ void signal_sent_rows(const DispatchArgs& args, uint64_t epoch, SentLog& log,
                                                 int senders) {
    constexpr unsigned kPollNanoseconds = 50;
    const int rank = args.group().rank, lane = static_cast<int>(threadIdx.x) % kWarpSize;
    uint32_t signalled = 0;
    bool active = lane < senders;
    while (__any_sync(kFullMask, active)) {
        const bool last = active && log.ended[lane] != 0;  // read before what it sent
        const uint32_t sent = active ? log.sent[lane] : signalled;
        if (!__any_sync(kFullMask, sent != signalled)) {
            active = active && !last;
            __nanosleep(kPollNanoseconds);
            continue;
        }
        fence_system();
        for (; signalled != sent; ++signalled) {
            const uint32_t at = signalled % SentLog::kLength;
            uint64_t* flags = args.row_flag(log.rank[lane][at], rank, log.number[lane][at]);
            for (int k = 0; k < log.rows[lane][at]; ++k) store_relaxed_system(flags + k, epoch);
        }
        if (active) log.signalled[lane] = signalled;
        __syncwarp();
    }
}

// True when all members have started the call and sent their scales; false if that takes longer than
// kSpinLimit. Called by one warp.
__device__ __forceinline__ bool all_arrived(const DispatchArgs& args, uint64_t epoch) {
    const PeerGroup& group = args.group();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const bool late = lane < group.size && lane != group.rank &&
                      !wait_until_reached(group.flag(group.rank, lane), epoch, kSpinLimit);
    __syncwarp();
    return !__any_sync(kFullMask, late);
}

// Copies received rows to their rows of dst: every `step`-th of this rank's own rows and of the remote rows.
// Remote rows are copied as soon as they arrive, own rows meanwhile, scales and padding last. Called by one
// warp. False: something did not arrive within kSpinLimit.
__device__ __forceinline__ bool receive_rows(const DispatchArgs& args, uint64_t epoch, Ring& ring,
                                             int64_t first, int64_t step) {
    struct Row {
        bool exists;
        const uint8_t* data;
        const uint64_t* flag;
        int64_t dst_row;  // that of the lane
    };
    const PeerGroup& group = args.group();
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t own_end = args.received.offsets[group.rank + 1], items = args.received_items(),
                  base = args.dst.base();
    uint8_t* const buffer = group.buffer(group.rank, epoch);
    uint8_t* const dst = static_cast<uint8_t*>(args.dst.data);
    int64_t at_own = args.received.offsets[group.rank] + first, at_remote = first;
    const auto find_own = [&]() -> Row {
        if (at_own >= own_end) return {};
        return {true, args.data_of(group.rank, at_own, buffer), nullptr, args.dst_row(at_own, lane)};
    };
    const auto find_remote = [&]() -> Row {
        for (; at_remote < items; at_remote += step) {
            const DispatchArgs::Item row = args.item(at_remote);
            if (args.is_received(row))
                return {true, args.rows.data_in(buffer, row.rank, row.n),
                        args.row_flag(group.rank, row.rank, row.n),
                        args.dst_row(args.received.offsets[row.rank] + row.n, lane)};
        }
        return {};
    };
    Row own = find_own(), remote = find_remote(), now{};
    bool scales_due = true, all = true;
    uint64_t idle_since = 0;  // 0: not idle
    while (true) {
        const bool has_free_stage = ring.issued - ring.done < kRing - kReadsPending;
        if (has_free_stage && !now.exists) {
            const bool arrived = remote.exists && load_acquire_system(remote.flag) >= epoch;
            if (__all_sync(kFullMask, arrived)) {
                fence_async_global();
                now = remote;
                at_remote += step;
                remote = find_remote();
            } else if (own.exists) {
                now = own;
                at_own += step;
                own = find_own();
            }
        }
        if (has_free_stage && now.exists) {
            idle_since = 0;
            bulk_wait_read<kReadsPending>();
            __syncwarp();
            ring.target(ring.issued)[lane] = static_cast<int32_t>(now.dst_row);
            if (lane == 0) ring.issue(now.data);
            if (ring.ends_row(ring.issued++)) now.exists = false;
        } else if (ring.issued != ring.done) {
            ring.wait_for_oldest();
            const int32_t dst_row = ring.target(ring.done)[lane];
            if (dst_row >= 0) ring.store_to_dst(dst + (base + dst_row) * args.rows.row_bytes);
            bulk_commit();
            ++ring.done;
        } else if (scales_due) {
            scales_due = false;
            if (all_arrived(args, epoch))
                write_all_scales_and_pads(args, buffer, first, step);
            else
                all = false;
        } else if (!remote.exists) {
            break;
        } else if (const uint64_t time = global_nanoseconds(); idle_since == 0) {
            idle_since = time;
        } else if (time - idle_since > kSpinLimit) {
            all = false;
            break;
        }
    }
    bulk_wait<0>();
    return all;
}

// The role of a warp: warp `number` of `count` warps that send, or that receive. In a CTA with senders the
// last warp signals what the `number` senders have sent.
struct Role {
    enum Kind { send, receive, signal } kind;
    int64_t number, count;
};
// A CTA either sends or receives, because the stores of an SM drain in order: local stores would wait for
// stores to peers. The numbers of CTAs are in proportion to the rows stored. A grid of one CTA does both.
// Neighbouring items are on different SMs.
__device__ __forceinline__ Role role_of_warp(const DispatchArgs& args) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize, cta = static_cast<int>(blockIdx.x),
              ctas = static_cast<int>(gridDim.x);
    const int64_t sent = args.sent_rows(), taken = args.dst_rows();
    if (sent == 0) return {Role::receive, warp * ctas + cta, kWarps * ctas};
    const bool both = ctas == 1;
    const int balanced = static_cast<int>((sent * ctas + sent + taken - 1) / (sent + taken)),
              senders = both ? 1 : min(balanced, min(kMostSenders, ctas - 1)),
              send_warps = both ? kWarps / 4 : kWarps - 1;
    if (cta < senders && warp == kWarps - 1) return {Role::signal, send_warps, 0};
    if (cta < senders && warp < send_warps) return {Role::send, warp * senders + cta, send_warps * senders};
    if (both) return {Role::receive, warp - send_warps, kWarps - 1 - send_warps};
    return {Role::receive, warp * (ctas - senders) + cta - senders, kWarps * (ctas - senders)};
}

// Sends and receives all rows of a dispatch. kMost: rows of a bundle, at most. Lower bound: reads each row
// that another rank needs once per rank and sends it over NVLink, reads each received row once (those of
// other ranks mostly from L2), writes every row of dst. At T=4096, E=256, K=8, H=7168 and FP8: two GPUs 29 MB
// over NVLink (360 GB/s: 82 us) and 330 MB of memory traffic, four GPUs 81 MB over NVLink. Grid: up to one
// CTA per SM, 10 warps, each with one role (role_of_warp). Shared memory: a ring of kRing pieces per warp. A
// row passes through it by TMA, one bulk load and one bulk store per row of dst, so that few SMs suffice.
// Barriers: each warp's mbarriers for TMA, and one __syncthreads at the end. Deterministic: copies only, one
// writer per byte.
template <int kMost>
__global__ __launch_bounds__(kWarps* kWarpSize, 1) void dispatch_kernel(const DispatchArgs args) {
    extern __shared__ __align__(128) uint8_t slots[];
    __shared__ Mbarrier arrived[kWarps][kRing];
    __shared__ int32_t targets[kWarps][kRing * kWarpSize];
    pdl_launch_dependents();
    if (args.group().lost()) return;
    const uint64_t epoch = args.group().epoch() + 1;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    Ring ring(args, slots + int64_t{warp} * kRing * args.stage_bytes, arrived[warp], targets[warp]);
    __shared__ SentLog log;
    if (threadIdx.x < kWarps) {
        log.sent[threadIdx.x] = 0;
        log.signalled[threadIdx.x] = 0;
        log.ended[threadIdx.x] = 0;
    }
    __syncthreads();
    const Role role = role_of_warp(args);
    if (role.kind == Role::send) {
        if (threadIdx.x % kWarpSize == 0)
            send_rows<kMost>(args, epoch, ring, SentRows(args, role.number, role.count), log, warp);
    } else if (role.kind == Role::signal) {
        signal_sent_rows(args, epoch, log, static_cast<int>(role.number));
    } else {
        send_scales(args, epoch, role.number, role.count);
        if (!receive_rows(args, epoch, ring, role.number, role.count)) args.group().words->deferred = epoch;
    }
    end_sending(args, epoch);
}

template <int kMost> void launch_dispatch(const DispatchArgs& args, const Launch& launch) {
    const std::size_t bytes = static_cast<std::size_t>(kWarps * kRing * args.stage_bytes);
    launch_kernel(dispatch_kernel<kMost>,
                  grid_for(ceil_div(args.barrier.group.size * args.rows.slots, kWarps), launch, 1),
                  kWarps * kWarpSize, bytes, launch, "dispatch", args);
}

}  // namespace

void PeerExchange::dispatch_to(RowTarget target, const ScaledTensor& rows, const ScaledTensor& dst,
                               const Call& call) {
    const auto& [plan, scratch, launch] = call;
    last_stream_ = launch.stream;
    const int64_t slots = plan.all_ids.dim(1), row_bytes = rows.data.cols() * size_of(rows.data.dtype);
    if (row_bytes == 0) return;
    const bool scaled = rows.layout != ScaleLayout::none, fan_out = target == RowTarget::experts;
    const auto is_multiple = [](std::initializer_list<const void*> addresses, int64_t bytes, int64_t unit) {
        for (const void* address : addresses)
            bytes |= static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
        return bytes % unit == 0;
    };
    const bool vectorised = is_multiple({rows.data.data, dst.data.data}, row_bytes, kPeerVector);
    const int64_t most = vectorised ? kMostBundled : 1, pieces = ceil_div(row_bytes, kPieceBytes),
                  bundle = std::clamp(kPieceBytes / row_bytes, int64_t{1}, most),
                  stage_bytes = round_up(ceil_div(bundle * row_bytes, pieces), kPieceAlign),
                  scale_bytes = scaled ? rows.scales.cols() * size_of(rows.scales.dtype) : 0;
    DispatchArgs args{.barrier = barrier_of(kExpertParallel, PeerOperation::dispatch),
                      .row_flags = layout_.row_flags,
                      .row_flag_stride = layout_.flagged_rows,
                      .rows = {.data = rows.data.bytes_ptr(),
                               .scales = nullptr,
                               .row_bytes = row_bytes,
                               .scale_bytes = scale_bytes,
                               .scale_offset = peer_aligned(size() * slots * row_bytes),
                               .slots = slots,
                               .blocks = 0,
                               .scale_dtype = DType::f32,
                               .scale_words = false},
                      .send_tokens = plan.send_tokens.as<int32_t>(),
                      .send_counts = plan.send_counts.as<int64_t>(),
                      .received = {plan.recv_offsets.as<int64_t>(), plan.recv_source.as<int32_t>(), slots},
                      .recv_rows = fan_out ? plan.recv_rows.as<int32_t>() : nullptr,
                      .topk = plan.topk,
                      .row_source = device_view(plan.row_source),
                      .groups = device_groups(plan.groups, plan.groups.row_capacity),
                      .dst = device_view(dst.data),
                      .dst_scales = nullptr,
                      .dst_scale_dtype = DType::f32,
                      .dst_row_stride = 0,
                      .dst_block_stride = 0,
                      .vectorised = vectorised,
                      .pieces = static_cast<int>(pieces),
                      .piece_bytes = static_cast<int>(round_up(ceil_div(row_bytes, pieces), kPieceAlign)),
                      .bundle = static_cast<int>(bundle),
                      .stage_bytes = static_cast<int>(stage_bytes)};
    if (scaled) {
        args.rows.scales = rows.scales.bytes_ptr();
        args.rows.blocks = rows.scales.cols();
        args.rows.scale_dtype = rows.scales.dtype;
        args.rows.scale_words = is_multiple({rows.scales.data}, scale_bytes, sizeof(uint32_t));
        args.dst_scales = dst.scales.data;
        args.dst_scale_dtype = dst.scales.dtype;
        args.dst_row_stride = fan_out ? 1 : args.rows.blocks;
        args.dst_block_stride = fan_out ? dst.scales.dim(1) : 1;
    }
    check_fits(args.rows.scale_offset + size() * slots * scale_bytes, "a dispatch");
    FP8FLOW_CHECK(slots <= layout_.flagged_rows, "{} tokens per rank, the exchange has flags for {}", slots,
                  layout_.flagged_rows);
    if (!vectorised)
        launch_send_plain_rows(args, launch);
    else if (bundle == 1)
        launch_dispatch<1>(args, launch);
    else
        launch_dispatch<kMostBundled>(args, launch);
    launch_deferred_rows(args, launch);
}

void PeerExchange::do_dispatch(const ScaledTensor& rows, const ScaledTensor& dst, const Call& call) {
    dispatch_to(RowTarget::experts, rows, dst, call);
}

void PeerExchange::do_dispatch_rows(const ScaledTensor& rows, const ScaledTensor& received,
                                    const Call& call) {
    dispatch_to(RowTarget::received, rows, received, call);
}

}  // namespace fp8flow::hopper::peer
