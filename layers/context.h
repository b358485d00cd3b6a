// SPDX-License-Identifier: MIT
// Context: what every layer call gets: operations, exchange, arenas, streams, and the sizes of this
// micro-batch. The forward keeps what the backward needs in `saved` (and `rows` for routed rows); `scratch`
// lives for one layer call. Read next: flows/flow.h.
#pragma once

#include "kernels/core/arena.h"
#include "kernels/core/stage_timer.h"
#include "kernels/exchange.h"
#include "kernels/ops.h"
#include "layers/row_arena.h"
#include "layers/schedule/delayed_wgrads.h"

#include <string_view>
#include <vector>

namespace fp8flow {

class SideStream;
class TensorStats;
class InterleavedMicroBatch;
class WireStream;
struct Context;

// Called after every GEMM of the experts with its operand and result: `replay --intermediates`.
class GemmObserver {
public:
    virtual ~GemmObserver() = default;
    // stage: "fc1", "fc2", "fc2 dgrad" or "fc1 dgrad". operand [M, .] as the GEMM read it, FP8 or plain;
    // result [M, .].
    virtual void gemm(Context& ctx, std::string_view stage, const ScaledTensor& operand,
                      const TensorView& result, const RowGroups& groups) = 0;
    virtual void router_gradient(Context& ctx, const TensorView& dprobs) = 0;  // [T, K]
};

// The objects that a layer call works with.
struct Resources {
    Ops& ops;
    Exchange& exchange;
    Arena& saved;
    Arena& scratch;
    RowArena& rows;
    StageTimer& timer;
};

// Sizes of the micro-batch, and how its layers run.
struct MicroBatchState {
    DType activation =
        DType::bf16;     // dtype of the residual stream (f32 in the internal recipe of gradient checks)
    int64_t tokens = 0;  // T of this rank in this micro-batch
    int64_t tokens_per_rank = 0;  // S: the largest T over all ranks
    int64_t seq_length = 0;
    int64_t layer_row_capacity = 0;                    // row capacity of one MoE layer
    const std::vector<int64_t>* known_rows = nullptr;  // by layer, if the host knows them; for costs only
    RowGroups all_tokens;  // one group of the T rows: what shared experts and dense FFNs run on
    int64_t num_micro_batches = 1;
    int64_t micro_batch = 0;  // index inside the step
    int64_t data_parallel_size = 1;
    int64_t global_tokens = 0;                 // tokens of this micro-batch over all ranks
    Gradient grad_mode = Gradient::overwrite;  // the first micro-batch overwrites main gradients
    bool reduces_gradients = false;            // the last micro-batch: overlap_grad_reduce
    // overlap_param_gather: the first micro-batch of the next step gathers the working copies.
    bool overlaps_param_gather = false;
    // The last micro-batch, if nothing else is added to expert gradients: weight-gradient GEMMs also write
    // the sums of their squares for the gradient norm (combine order rank).
    bool sums_squares = false;
    DelayedWgrads* delayed = nullptr;  // absent: every micro-batch computes its own weight gradients
    bool recomputing = false;  // a forward re-run in the backward, or an evaluation: count no statistics
    // Inputs of stochastic rounding's random numbers, in addition to the tensor and the micro-batch.
    struct Rounding {
        uint64_t seed = 0;
        TensorView step;      // [1] i64 on the device: rounding_step()
        int64_t replica = 0;  // of this rank, among the ranks that hold the same experts
    } rounding = {};
    // Routing from a file or into one, for all MoE layers; absent: neither.
    struct Routing {
        TensorView given;  // [layers, S, K] i32: the experts, in place of the routers' choices
        // Page-locked [layers, S, K]: receives the routers' choices in the forward, also with given ids.
        int32_t* chosen = nullptr;
    } routing = {};
    TensorView step_status;  // [1] i32 on the device: 0: fine; otherwise every persistent write is skipped
    TensorStats* tensor_stats = nullptr;
    int64_t layer = 0;  // of the model, for tensor_stats
    GemmObserver* gemms = nullptr;
    SideStream* side = nullptr;                    // null: operations run one after the other
    WireStream* wire = nullptr;                    // null: exchange calls run between the other operations
    InterleavedMicroBatch* interleaved = nullptr;  // null: not interleaved
    Launch launch = {};
};

struct Context : Resources, MicroBatchState {
    // Times a stage (norm, fc1, ...) or a part of the model (MoE layer, head, ...) until the end of the
    // scope.
    StageTimer::Scope stage(const char* name) { return stage(name, launch); }
    StageTimer::Scope stage(const char* name, const Launch& of) {
        return {timer, StageLevel::stage, name, of};
    }
    StageTimer::Scope part(const char* name) { return {timer, StageLevel::part, name, launch}; }
    // The same micro-batch with other arenas.
    Context with(Arena& other_saved, Arena& other_scratch) const {
        return {{ops, exchange, other_saved, other_scratch, rows, timer}, *this};
    }
    // Whether expert weight gradients of this micro-batch wait for the next one's.
    bool delays_wgrads() const { return delayed != nullptr && delayed->waits(); }
};

// A mark in the arenas of saved activations. rewind() drops what a forward saved since then, because the
// backward runs the forward again (recompute moe, full).
class SavedMark {
public:
    explicit SavedMark(const Context& ctx)
        : saved_(ctx.saved.mark()),
          delayed_(ctx.delayed != nullptr ? ctx.delayed->arena().mark() : Arena::Mark{}),
          depth_(ctx.rows.depth()) {}
    void rewind(Context& ctx) const {
        ctx.saved.rewind(saved_);
        if (ctx.delayed != nullptr) ctx.delayed->arena().rewind(delayed_);
        ctx.rows.pop(depth_);
    }

private:
    Arena::Mark saved_, delayed_;
    int64_t depth_;
};

// A forward that is run again in the backward: until the end of the scope nothing is counted a second time.
class RecomputeScope {
public:
    explicit RecomputeScope(Context& ctx) : ctx_(ctx), outer_(ctx.recomputing) { ctx.recomputing = true; }
    ~RecomputeScope() { ctx_.recomputing = outer_; }
    RecomputeScope(const RecomputeScope&) = delete;
    RecomputeScope& operator=(const RecomputeScope&) = delete;

private:
    Context& ctx_;
    bool outer_;
};

}  // namespace fp8flow
