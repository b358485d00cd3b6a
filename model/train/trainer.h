// SPDX-License-Identifier: MIT
// Trainer: one rank's part of a training run: data in, steps out. The host runs one step ahead: it launches a
// step and then reads the result of the step before, so that a warm step never waits for the device. Read
// next: commands/train.cpp, commands/validate.cpp.
//
// A step is a transaction. If the step status, a word on the device, is not 0, nothing persistent is written.
// A step that runs out of rows or produces a NaN on any rank sets it on all ranks. It stays set, so the step
// that was launched after a bad one changes nothing either. The host sees it one step late, waits for what is
// in flight, increases the row capacity, clears the word and launches the same steps again, in order. The
// bits are those of a run that had the capacity from the start.
#pragma once

#include "layers/tensor_stats.h"
#include "model/config/config.h"
#include "model/data/batch_feed.h"
#include "model/data/data.h"
#include "model/job/backend.h"
#include "model/train/captured_steps.h"
#include "model/train/divergence.h"
#include "model/train/optimizer.h"
#include "model/train/step_inputs.h"
#include "model/train/step_record.h"
#include "model/train/step_routing.h"
#include "model/train/transformer.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fp8flow {

class InterleavedPair;

// Load of one MoE layer over the global batch: tokens of an expert divided by the mean (1: balanced, 0: a
// dead expert).
struct LayerLoad {
    int layer = 0;
    double max = 1, min = 1, cv = 0;
    int64_t dead_experts = 0;
    std::vector<int64_t> tokens;          // of each expert
    std::optional<double> equal_choices;  // part of the router's choices that are among the given ids
};
LayerLoad load_of(int layer, std::span<const int64_t> tokens_per_expert);

// A balancing loss or the z-loss, as Megatron-LM names and logs it: without its coefficient, the mean over
// ranks and micro-batches.
struct RouterLoss {
    std::string name;
    std::vector<double> by_layer;  // MoE layers
    double mean() const;
};

struct StepResult {
    int64_t step = 0;   // 0-based
    int64_t batch = 0;  // of the data; another than `step` after a rollback, or with more data
    double lm_loss = 0;
    double balancing_loss = 0, z_loss = 0;  // coefficients included, summed over kinds and layers
    std::vector<RouterLoss> router_losses;  // those with a coefficient above 0
    double grad_norm = 0, learning_rate = 0;
    double seconds = 0;       // host clock: from the end of the step before, or its later launch, to its end
    double host_seconds = 0;  // that the host took to launch it
    int64_t host_stops = 0;   // waits for the device during the launch (Device::num_synchronisations)
    int64_t tokens = 0;       // of the global batch
    int64_t redone = 0;       // how often it ran out of rows, and was redone with a larger capacity
    double redo_seconds = 0;  // lost by that: from the begin of each redone attempt to the next one
    std::vector<LayerLoad> load;
    // Of this rank, for the last attempt.
    std::map<std::string, double> stage_seconds;
    WireBytes wire;
    int64_t casts = 0;        // explicit casts, all layers and micro-batches
    int64_t peak_bytes = 0;   // activations and workspace
    bool stop_asked = false;  // on any rank (Trainer::stop_when); every rank has the same
    std::string skipped;      // why the step was not applied (training.on_divergence: skip); empty: it was
};

// Routed rows did not fit, and a larger capacity does not fit into memory on some rank. The model is that
// before the step, which was not applied.
class OutOfRowMemory : public Error {
public:
    explicit OutOfRowMemory(const std::string& text) : Error(ExitCode::memory, text) {}
};

class Trainer {
public:
    static constexpr int64_t kStepsInFlight = 2;

    Trainer(const Config& config, ProcessGroup& world, const BackendChoice& backend, Arithmetic arithmetic,
            std::shared_ptr<const data::TokenSource> data);
    ~Trainer();

    // Launches the next step. Returns the result of the step before, or nothing if none was in flight. If a
    // step diverged, neither it nor the one after it is applied. Then (training.on_divergence) it throws
    // Diverged with step and tensor, or skips the step and launches the one after it again. Throws
    // OutOfRowMemory if a step cannot be redone. Nothing is in flight when it throws.
    std::optional<StepResult> step();
    // The result of the step in flight, if there is one. The state of the model is that of a step only when
    // nothing is in flight.
    std::optional<StepResult> drain();
    // One step from launch to result, for measurements and tests. Nothing is in flight.
    StepResult run_step();
    // Mean held-out loss in nats per token over `batches` global batches. Nothing is in flight: drain()
    // first. `read`, which may stop the host, gets the first sample of this rank's micro-batch and the head's
    // outputs chunk by chunk; again from its first token, where rows did not fit.
    using ReadEvaluation = std::function<void(int64_t first_sample, const HeadChunk&)>;
    double evaluate(int64_t batches, const ReadEvaluation& read = {});
    // Sets the data of later evaluations; the same on every rank.
    void evaluate_on(std::shared_ptr<const data::TokenSource> data) { data_ = std::move(data); }
    // Call it after replacing masters, moments and other state by those after `steps` steps, of which
    // `applied` were not skipped. Updates the working copies. Nothing is in flight.
    void resume_at(int64_t steps, int64_t applied);
    // Follows the rules of the run that is resumed (config/changed_rules.h); call it before the next step.
    void follow_rules_of(const Config& config);
    // Call it after replacing the masters. Updates the working copies. Collective; nothing is in flight.
    void weights_replaced();
    // Step n trains on batch n + this. Nothing is in flight.
    void set_first_batch(int64_t batch) { first_batch_ = batch; }
    int64_t first_batch() const { return first_batch_; }
    int64_t steps_done() const { return next_step_ - std::ssize(flights_); }
    int64_t steps_applied() const { return steps_done() - skipped_; }

    // `asked`: whether the run should stop, called once per step. The answers are reduced with the loss, so
    // that all ranks see them in the result of the same step.
    void stop_when(std::function<bool()> asked) { stop_asked_ = std::move(asked); }
    // A diagnosis of the steps launched from now on (--tensor-stats); null switches it off.
    void set_tensor_stats(TensorStats* stats) { tensor_stats_ = stats; }
    // Seconds per stage of the steps launched from now on, and what each had to do; off costs nothing.
    // Nothing is in flight.
    void time_stages(TimerDetail detail);
    // For measurements: the steps launched from now on end after the backward pass. Gradients are neither
    // reduced nor applied, so the weights stay. Nothing is in flight.
    void run_passes_alone(bool alone);
    // Of the last step with a result, until another is launched in its place.
    const StageTimer& timer() const { return timers_[slot_of(steps_done() - 1)]; }
    // Routed rows by layer, as bytes and FLOPs of stages should count them (default: the row capacity).
    void set_known_rows(std::vector<int64_t> rows) { known_rows_ = std::move(rows); }
    Transformer& transformer() { return *transformer_; }
    Ops& ops() { return *ops_; }
    ProcessGroup& expert_parallel_group() { return *groups_.expert_parallel; }
    Exchange& exchange() { return *exchange_; }
    const std::string& exchange_note() const { return exchange_note_; }  // one line; empty for one rank
    // After the first step, on the first rank: which file output.record_routing replaced; empty: none.
    std::string routing_note() const { return routing_ ? routing_->note() : ""; }
    // The capacity for routed rows, and the most that plans have needed since it last grew: of
    // one layer, and of all that are saved together.
    using Rows = RowArena::Wanted;
    Rows row_capacity() const { return capacity_; }
    Rows most_wanted() const;  // stops the host; nothing is in flight
    // The part of padding in the rows that the grouped GEMMs of the last micro-batch read, on all ranks.
    // Collective; waits for the device; nothing is in flight.
    double padding_share() const;
    // Evaluations that were run again with a larger capacity.
    int64_t evaluations_redone() const { return evaluations_redone_; }
    // Bytes saved for the backward at the peak of the last step, by category, this rank; routed rows per
    // category as capacity.
    std::map<std::string, int64_t> saved_bytes() const;
    // The same as two sums: taken from the device, and filled by the last micro-batch. Nothing is in flight.
    struct MemorySums {
        int64_t reserved = 0, used = 0;
    };
    MemorySums saved_memory() const;
    // Workspace of layers, sized by the row capacity: taken from the device, and the peak of the last step.
    MemorySums workspace_memory() const;
    std::map<std::string, int64_t> parameter_bytes() const { return transformer_->parameters().bytes(); }
    int64_t allocations() const;  // constant in warm steps
    // Absent unless steps are launched as graphs.
    const CapturedSteps* captured() const { return captured_.get(); }

private:
    // A launched step; its result is not taken yet.
    struct Flight {
        int64_t step = 0;
        double launched = 0, begun = 0;  // clock_seconds(): first; last, where it is redone
        std::optional<double> ended;
        StepResult result;      // what the host alone knows of it
        double loss_limit = 0;  // of the mean loss; the same however often the step is done
        TensorStats* tensor_stats = nullptr;
    };
    void join_wgrads(int64_t micro_batches);  // 0, 1: one GEMM per micro-batch
    void launch(Flight& flight);
    CapturedSteps::Known give_work(const Flight& flight);
    StepInputs::Values inputs_of(const Flight& flight) const;
    // Its 0-based number among the applied steps, for the learning-rate schedule, Adam and histories. A step
    // that was launched before a skip was known is not applied, and is launched again.
    int64_t update_of(const Flight& flight) const { return flight.step - skipped_; }
    int64_t tokens_of_step() const { return config_.training.global_batch_size * config_.model.seq_length; }
    double mean_loss(const StepRecord& record) const { return record.loss_sum() / f64(tokens_of_step()); }
    StepRecord& record_of(const Flight& flight) { return *records_[slot_of(flight.step)]; }
    // Of the page-locked memory of a step. The step that used it before has been waited for.
    static size_t slot_of(int64_t step) { return to_size(step % kStepsInFlight); }
    int32_t wait_for(Flight& flight);  // its status
    StepResult take_result();
    StepResult result_of(const Flight& flight);  // of the oldest step, whose record has passed
    void keep_routing(const Flight& flight, std::vector<LayerLoad>& load);
    std::vector<RouterLoss> router_losses_of(const StepRecord& record) const;
    void redo();
    void launch_again();  // all in flight, whose work was not applied
    StepResult skip_step();
    [[noreturn]] void give_up();

    StageTimer& timer_of(const Flight& flight) { return timers_[slot_of(flight.step)]; }
    // Arenas and tokens of a micro-batch: one set, or two if micro-batches are interleaved
    // (overlap_moe_expert_parallel_comm).
    struct Memory {
        Memory(Device& device, int64_t seq_length, int64_t max_tokens, int64_t num_slots)
            : feed(device, seq_length, max_tokens, num_slots),
              saved(device, "saved"),
              scratch(device, "scratch") {}
        data::BatchFeed feed;
        Arena saved, scratch;
        std::unique_ptr<RowArena> rows;
    };
    Memory& memory_of(int64_t micro_batch) { return *memory_[to_size(micro_batch) % memory_.size()]; }
    Context make_context(int64_t micro_batch, StageTimer& timer);
    void run_micro_batches(const Flight& flight);
    Transformer::MicroBatch load_micro_batch(Context& ctx, const Flight& flight);
    void run_interleaved(const Flight& flight);
    int64_t batch_slot(const Flight& flight, int64_t micro_batch) const {
        return static_cast<int64_t>(slot_of(flight.step)) * batcher_.num_micro_batches() + micro_batch;
    }
    void fill_batch(data::Split split, int64_t global_batch, int64_t micro_batch, int64_t slot);
    data::BatchFeed::Batch load_batch(Context& ctx, int64_t slot);
    struct HeldOut {
        int32_t status;
        float sum;
    };
    HeldOut* held_out_of(int64_t index) const {  // of a micro-batch that is evaluated
        const int64_t slot = index % (kStepsInFlight * batcher_.num_micro_batches());
        return held_out_->at<HeldOut>(to_size(slot) * sizeof(HeldOut));
    }
    void launch_evaluation(int64_t index, const ReadEvaluation& read);
    void give_evaluation(int64_t micro_batch, int64_t slot, const ReadHead& read);
    std::vector<Arena*> arenas() const;     // of activations and workspace
    std::vector<Arena*> workspace() const;  // those that grow with the row capacity
    Rows rows_of_layers(int64_t layer_rows) const;
    void grow_rows();
    void require_memory(const Rows& capacity);
    std::string reason_of(const Flight& flight);
    [[noreturn]] void report_non_finite(int64_t step);
    std::string largest_gradient();
    template <class T> T read_word(const TensorView& word) const {
        T value{};
        ops_->device().copy_out(&value, word.data, sizeof value);
        return value;
    }

    Config config_;
    ProcessGroup& world_;
    RankGroups groups_;
    std::unique_ptr<Ops> ops_;
    std::unique_ptr<Exchange> exchange_;
    std::string exchange_note_;
    std::shared_ptr<const data::TokenSource> data_;
    data::Batcher batcher_;
    std::unique_ptr<Transformer> transformer_;
    std::unique_ptr<Optimizer> optimizer_;
    std::unique_ptr<Arena> state_;
    std::vector<std::unique_ptr<Memory>> memory_;
    std::unique_ptr<DelayedWgrads> delayed_;  // with moe_wgrad_micro_batches
    // where a schedule overlaps
    std::unique_ptr<SideStream> side_;
    std::unique_ptr<WireStream> wire_;
    std::unique_ptr<InterleavedPair> pair_;
    StageTimer timers_[kStepsInFlight], untimed_;
    std::vector<int64_t> known_rows_;
    bool passes_alone_ = false;
    TensorStats* tensor_stats_ = nullptr;
    Stream stream_;  // of the main stream
    TensorView status_, held_out_sum_;
    std::unique_ptr<StepInputs> inputs_;
    std::unique_ptr<CapturedSteps> captured_, captured_evaluations_;
    std::unique_ptr<StepRouting> routing_;  // absent: neither given nor recorded
    std::unique_ptr<PinnedBuffer> held_out_;
    std::unique_ptr<HostEvent> held_out_events_[kStepsInFlight];
    std::function<bool()> stop_asked_;
    Rows capacity_, worst_capacity_;
    int64_t evaluations_redone_ = 0;
    std::unique_ptr<StepRecord> records_[kStepsInFlight];
    std::deque<Flight> flights_;  // oldest first
    int64_t next_step_ = 0, first_batch_ = 0;
    DivergenceLimits limits_;
    int64_t skipped_ = 0, skipped_in_a_row_ = 0;  // steps since step 0, of earlier runs too; the last ones
    double last_end_ = 0;                         // of the last step with a result
};

// The data of a config. Throws Error(usage) for text where a config.json brings another vocabulary.
std::shared_ptr<const data::TokenSource> open_data(const Config& config);

}  // namespace fp8flow
