// Trainer: one rank's part of a training run: data in, steps out. A step is a transaction: if a rank runs out of row capacity, nothing is
// written and the step is redone with more room. Read next: train_command.cpp, validate_command.cpp.
#pragma once

#include "model/backend.h"
#include "model/config.h"
#include "model/data.h"
#include "model/optimizer.h"
#include "model/transformer.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

// Utilisation of one MoE layer over the global batch: tokens of an expert over the mean (1 is fair, 0 a dead expert).
struct LayerLoad {
    int layer = 0;
    double max = 1, min = 1, cv = 0;
    int64_t dead_experts = 0;
};
LayerLoad load_of(int layer, const std::vector<int64_t>& tokens_per_expert);

struct StepResult {
    int64_t step = 0;  // 0-based
    double lm_loss = 0;
    double balancing_loss = 0, z_loss = 0;  // coefficients included, summed over layers
    double grad_norm = 0, learning_rate = 0;
    double seconds = 0;
    int64_t tokens = 0;  // of the global batch
    int64_t redone = 0;  // how often the step was redone with more room
    std::vector<LayerLoad> load;
    std::map<std::string, double> stage_seconds;  // this rank
    WireBytes wire;                               // this rank
    int64_t casts = 0;                            // explicit casts, all layers and micro-batches
    int64_t peak_bytes = 0;                       // activations and workspace of this rank
};

class Trainer {
public:
    Trainer(const Config& config, ProcessGroup& world, const BackendChoice& backend, Arithmetic arithmetic,
            std::shared_ptr<const TokenSource> data);
    ~Trainer();

    StepResult step();
    // Mean held-out loss in nats per token over `batches` global batches.
    double evaluate(int64_t batches);
    int64_t steps_done() const { return step_; }

    // A diagnosis of the next step (--tensor-stats); null switches it off.
    void set_tensor_stats(TensorStats* stats) { tensor_stats_ = stats; }
    void time_stages(bool on) { timer_.enable(on); }
    Transformer& transformer() { return *transformer_; }
    Ops& ops() { return *ops_; }
    Exchange& exchange() { return *exchange_; }
    const std::string& exchange_note() const { return exchange_note_; }  // one line; empty for one rank
    // Bytes saved for the backward at the peak of the last step, by category, this rank; routed rows per category as capacity.
    std::map<std::string, int64_t> saved_bytes() const;
    std::map<std::string, int64_t> parameter_bytes() const { return transformer_->parameters().bytes(); }
    int64_t allocations() const;  // must not rise once warm

private:
    Context make_context(int64_t micro_batch);
    void run_micro_batches();
    void load_batch(Context& ctx, Split split, int64_t global_batch, int64_t micro_batch, TensorView& tokens,
                    TensorView& labels);
    double evaluate_micro_batch(int64_t batch, int64_t micro_batch, const TensorView& loss);
    void grow_rows();
    void read_router_statistics(StepResult& result);
    [[noreturn]] void report_non_finite();
    template <class T> T read_word(const TensorView& word) const;

    Config config_;
    ProcessGroup& world_;
    RankGroups groups_;
    std::unique_ptr<Ops> ops_;
    std::unique_ptr<Exchange> exchange_;
    std::string exchange_note_;
    std::shared_ptr<const TokenSource> data_;
    Batcher batcher_;
    std::unique_ptr<Transformer> transformer_;
    std::unique_ptr<Optimizer> optimizer_;
    std::unique_ptr<Arena> state_, saved_, scratch_;
    std::unique_ptr<RowArena> rows_;
    StageTimer timer_;
    TensorStats* tensor_stats_ = nullptr;
    TensorView status_, loss_sum_, tokens_, labels_;
    RowGroups all_tokens_;
    std::vector<int32_t> host_tokens_, host_labels_;
    int64_t layer_rows_ = 0, worst_layer_rows_ = 0;
    int64_t step_ = 0;
};

// The data of a config: text, synthetic or shards.
std::shared_ptr<const TokenSource> open_data(const Config& config);

}  // namespace fp8flow
