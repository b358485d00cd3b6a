// SPDX-License-Identifier: MIT
// The capacity for routed rows: how it grows when a step runs out of rows, and the memory that it takes.
#include "model/train/trainer.h"

#include "layers/schedule/side_stream.h"

#include <algorithm>
#include <cmath>

namespace fp8flow {

namespace {

// The capacity for `wanted` rows and a tenth more, so that slowly changing routing does not redo every step.
// Unchanged if it is enough.
int64_t grown(int64_t capacity, int64_t wanted, int64_t worst) {
    constexpr double kHeadroom = 1.1;
    if (wanted <= capacity) return capacity;
    const auto rows = static_cast<int64_t>(std::ceil(kHeadroom * f64(wanted)));
    return std::min(worst, round_up(rows, kBlock));
}

// Bytes for `rows` rows, if rows_now rows take `bytes`.
int64_t bytes_of(int64_t bytes, int64_t rows, int64_t rows_now) {
    const double ratio = f64(rows) / f64(std::max<int64_t>(1, rows_now));
    return static_cast<int64_t>(std::ceil(f64(bytes) * ratio));
}
double bytes_more(int64_t bytes, int64_t rows, int64_t rows_now) {
    return f64(bytes_of(bytes, rows, rows_now) - bytes);
}

}  // namespace

// Layers that are recomputed as a whole are saved one at a time.
Trainer::Rows Trainer::rows_of_layers(int64_t layer_rows) const {
    const bool one_layer =
        config_.recompute.recompute_granularity == RecomputeGranularity::full || config_.recompute.moe;
    const int64_t layers = one_layer ? 1 : std::max<int64_t>(1, transformer_->num_moe_layers());
    return {.layer = layer_rows, .together = layer_rows * layers};
}

Trainer::Rows Trainer::most_wanted() const {
    Rows most;
    for (const auto& memory : memory_) {
        if (!memory->rows) continue;
        const Rows wanted = memory->rows->wanted();
        most.layer = std::max(most.layer, wanted.layer);
        most.together = std::max(most.together, wanted.together);
    }
    return most;
}

double Trainer::padding_share() const {
    const auto& rows = memory_[to_size(batcher_.num_micro_batches() - 1) % memory_.size()]->rows;
    if (!rows || transformer_->num_moe_layers() == 0) return 0;
    // Every token takes top-k rows on some rank; padding is what ranks hold beyond that.
    const double tokens = f64(config_.training.micro_batch_size * config_.model.seq_length * world_.size());
    const int64_t layers = rows_of_layers(1).together;  // saved together
    std::vector<int64_t> used = {rows->used_rows()};
    world_.all_reduce_sum(used);
    const auto all = f64(used[0]);
    const double routed = tokens * f64(config_.moe.moe_router_topk * layers);
    return all > 0 ? 1 - routed / all : 0;
}

// All ranks check before anything is freed: a rank that ran out of memory inside a step would leave the
// others waiting for it. Row buffers and workspace are freed first and grow with the rows.
void Trainer::require_memory(const Rows& capacity) {
    double needed = 0;
    for (const auto& memory : memory_) {
        if (memory->rows)
            needed += bytes_more(memory->rows->reserved_bytes(), capacity.together, capacity_.together);
        // the unpadded plans of a layer
        const std::map<std::string, int64_t> saved = memory->saved.peak_by_category();
        if (const auto plans = saved.find("plan");
            plans != saved.end() && !config_.precision.moe_permute_padding_for_fp8)
            needed += bytes_more(plans->second, capacity.layer, capacity_.layer);
    }
    for (const Arena* arena : workspace())
        needed +=
            f64(bytes_of(arena->deepest_bytes(), capacity.layer, capacity_.layer) - arena->reserved_bytes());
    const double free = f64(ops_->device().free_bytes());
    std::vector<float> missing = {static_cast<float>(needed - free)};
    world_.all_reduce_max(missing);
    if (missing[0] <= 0) return;
    if (!flights_.empty()) next_step_ = flights_.front().step;
    flights_.clear();
    ops_->zero({.y = status_});
    constexpr double kGiB = 1 << 30;
    throw OutOfRowMemory(fmt::format(
        "step {}: routed rows exceed the capacity of {} rows per layer ({} of all layers); a capacity of {} "
        "({}) takes {:.2f} GiB more on this rank, {:.2f} GiB are free, and some rank lacks {:.2f} GiB; lower "
        "training.micro_batch_size, or set recompute.recompute_modules: [moe_expert]",
        next_step_ + 1, capacity_.layer, capacity_.together, capacity.layer, capacity.together, needed / kGiB,
        free / kGiB, f64(missing[0]) / kGiB));
}

// Enlarges the row buffers of all ranks to the largest need of any rank in the steps in flight. Buffers never
// shrink.
void Trainer::grow_rows() {
    const Rows mine = most_wanted();
    std::vector<int64_t> most = {mine.layer, mine.together};
    world_.all_reduce_max(most);
    const Rows wanted{.layer = most[0], .together = most[1]};
    Rows capacity{.layer = grown(capacity_.layer, wanted.layer, worst_capacity_.layer),
                  .together = grown(capacity_.together, wanted.together, worst_capacity_.together)};
    capacity.together = std::max(capacity.together, capacity.layer);
    require(
        capacity.layer > capacity_.layer || capacity.together > capacity_.together, ExitCode::internal,
        "routed rows do not fit: a layer needs {} and all layers need {}, with a capacity of {} and {} and "
        "a worst case of {} and {}",
        wanted.layer, wanted.together, capacity_.layer, capacity_.together, worst_capacity_.layer,
        worst_capacity_.together);
    require_memory(capacity);
    for (const auto& memory : memory_) memory->rows.reset();
    if (delayed_) delayed_->forget();
    // the next use allocates one chunk of the checked size
    for (Arena* arena : workspace())
        arena->release(bytes_of(arena->deepest_bytes(), capacity.layer, capacity_.layer));
    capacity_ = capacity;
    for (CapturedSteps* graphs : {captured_.get(), captured_evaluations_.get()})
        if (graphs != nullptr) graphs->forget();
}

// The oldest step in flight was not applied, nor was any step after it. All ranks see the same status, so all
// ranks call this.
void Trainer::redo() {
    for (Flight& flight : flights_) wait_for(flight);
    grow_rows();
    Flight& oldest = flights_.front();
    ++oldest.result.redone;
    oldest.result.redo_seconds += clock_seconds() - std::max(oldest.begun, last_end_);
    launch_again();
}

std::map<std::string, int64_t> Trainer::saved_bytes() const {
    std::map<std::string, int64_t> bytes;
    for (const auto& memory : memory_) {
        for (const auto& [category, peak] : memory->saved.peak_by_category()) bytes[category] += peak;
        if (!memory->rows) continue;
        for (const auto& [kind, per_row] : memory->rows->bytes_per_row())
            bytes["routed rows: " + kind] += static_cast<int64_t>(per_row * f64(memory->rows->capacity()));
    }
    if (delayed_) bytes["delayed weight gradients"] = delayed_->arena().peak_bytes();
    return bytes;
}

Trainer::MemorySums Trainer::saved_memory() const {
    FP8FLOW_CHECK(flights_.empty(), "saved memory with {} steps in flight", flights_.size());
    MemorySums sum;
    const auto add = [&](const Arena& arena) {
        sum.reserved += arena.reserved_bytes();
        sum.used += arena.peak_bytes();
    };
    if (delayed_) add(delayed_->arena());
    for (const auto& memory : memory_) {
        add(memory->saved);
        if (!memory->rows) continue;
        sum.reserved += memory->rows->reserved_bytes();
        const double rows = f64(memory->rows->used_rows());
        for (const auto& [kind, per_row] : memory->rows->bytes_per_row())
            sum.used += static_cast<int64_t>(per_row * rows);
    }
    return sum;
}

Trainer::MemorySums Trainer::workspace_memory() const {
    MemorySums sum;
    for (const Arena* arena : workspace()) {
        if (delayed_ && arena == &delayed_->arena()) continue;  // saved
        sum.reserved += arena->reserved_bytes();
        sum.used += arena->peak_bytes();
    }
    return sum;
}

std::vector<Arena*> Trainer::workspace() const {
    std::vector<Arena*> arenas;
    for (const auto& memory : memory_) arenas.push_back(&memory->scratch);
    if (delayed_) arenas.push_back(&delayed_->arena());
    if (side_)
        for (Arena* arena : side_->arenas()) arenas.push_back(arena);
    return arenas;
}

std::vector<Arena*> Trainer::arenas() const {
    std::vector<Arena*> arenas = workspace();
    for (const auto& memory : memory_) arenas.push_back(&memory->saved);
    return arenas;
}

int64_t Trainer::allocations() const {
    int64_t growths = 0;
    for (const auto& memory : memory_) growths += memory->rows ? memory->rows->num_growths() : 0;
    for (const Arena* arena : arenas()) growths += arena->num_growths();
    return growths;
}

}  // namespace fp8flow
