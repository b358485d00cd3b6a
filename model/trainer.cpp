// One training step as a list: batch, forward, backward, reductions, update, statistics; and the evaluation.
#include "model/trainer.h"

#include "kernels/core/random.h"
#include "model/data_shards.h"
#include "model/data_synthetic.h"
#include "model/data_text.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>

namespace fp8flow {

LayerLoad load_of(int layer, const std::vector<int64_t>& tokens) {
    LayerLoad load;
    load.layer = layer;
    const double mean = static_cast<double>(std::accumulate(tokens.begin(), tokens.end(), int64_t{0})) /
                        static_cast<double>(tokens.size());
    if (mean <= 0) return load;
    double squares = 0;
    for (int64_t count : tokens)
        squares += (static_cast<double>(count) / mean - 1.0) * (static_cast<double>(count) / mean - 1.0);
    load.max = static_cast<double>(*std::max_element(tokens.begin(), tokens.end())) / mean;
    load.min = static_cast<double>(*std::min_element(tokens.begin(), tokens.end())) / mean;
    load.cv = std::sqrt(squares / static_cast<double>(tokens.size()));
    load.dead_experts = std::count(tokens.begin(), tokens.end(), 0);
    return load;
}

namespace {

std::shared_ptr<const TokenSource> make_source(const Config& config) {
    const DataSpec& d = config.data;
    const int64_t seq = config.model.seq_length;
    const uint64_t seed = config.training.seed;
    switch (d.data_kind) {
        case DataKind::text:
            return std::make_shared<TextSource>(TextOptions{.data_path = d.data_path,
                                                            .extensions = d.file_extensions,
                                                            .max_bytes = d.max_bytes,
                                                            .held_out_fraction = d.held_out_fraction,
                                                            .seq_length = seq,
                                                            .seed = seed});
        case DataKind::synthetic:
            return std::make_shared<SyntheticSource>(
                SyntheticOptions{.vocab_size = d.synthetic_vocab_size,
                                 .order = d.synthetic_order,
                                 .zipf_exponent = d.synthetic_zipf_exponent,
                                 .successors = d.synthetic_successors,
                                 .noise = d.synthetic_noise,
                                 .seq_length = seq,
                                 .seed = d.synthetic_seed});
        case DataKind::shards:
            return std::make_shared<ShardSource>(ShardOptions{.data_path = d.data_path,
                                                              .vocab_size = config.model.vocab_size,
                                                              .seq_length = seq,
                                                              .seed = seed,
                                                              .held_out = ShardOptions::HeldOut::optional});
    }
    fail(ExitCode::internal, "unknown data kind {}", static_cast<int>(d.data_kind));
}

}  // namespace

std::shared_ptr<const TokenSource> open_data(const Config& config) {
    auto source = make_source(config);
    // Now, not after the last step.
    require(config.training.eval_iters == 0 || source->samples_per_epoch(Split::held_out) > 0, ExitCode::data,
            "data.data_path: nothing to evaluate on with training.eval_iters = {} (set it to 0, or add "
            "held-out files): {}",
            config.training.eval_iters, source->description());
    return source;
}

Trainer::Trainer(const Config& config, ProcessGroup& world, const BackendChoice& backend,
                 Arithmetic arithmetic, std::shared_ptr<const TokenSource> data)
    : config_(config),
      world_(world),
      groups_(make_rank_groups(world, static_cast<int>(config.parallel.expert_model_parallel_size))),
      ops_(make_ops(backend, arithmetic, config.kernels)),
      data_(std::move(data)),
      batcher_{config.training.global_batch_size, config.training.micro_batch_size, world.size()} {
    ExchangeChoice exchange = make_exchange(backend, groups_, *ops_, config);
    exchange_ = std::move(exchange.exchange);
    exchange_note_ = std::move(exchange.note);

    // Ranks that see different data or another configuration would diverge silently.
    const uint64_t mine = data_->fingerprint() ^ fnv1a64(dump_config(config_));
    std::vector<uint64_t> all(static_cast<size_t>(world.size()));
    world.all_gather(&mine, sizeof mine, all.data());
    for (size_t r = 0; r < all.size(); ++r)
        require(all[r] == all[0], ExitCode::peer,
                "rank {} has other data or another configuration than rank 0; check data.data_path", r);

    Device& device = ops_->device();
    transformer_ =
        std::make_unique<Transformer>(TransformerSpec{.model = config.model,
                                                      .moe = config.moe,
                                                      .precision = config.precision,
                                                      .recompute = config.recompute,
                                                      .expert_parallel_rank = groups_.expert_parallel->rank(),
                                                      .expert_parallel_size = groups_.expert_parallel->size(),
                                                      .seed = config.training.seed},
                                      *ops_);
    optimizer_ = std::make_unique<Optimizer>(config.training, device);
    state_ = std::make_unique<Arena>(device, "step");
    saved_ = std::make_unique<Arena>(device, "saved");
    scratch_ = std::make_unique<Arena>(device, "scratch");

    const int64_t slots = batcher_.samples(0, 0, 0).count * config.model.seq_length;
    status_ = state_->tensor(DType::i32, {1}, "step");
    loss_sum_ = state_->tensor(DType::f32, {1}, "step");
    tokens_ = state_->tensor(DType::i32, {slots}, "batch");
    labels_ = state_->tensor(DType::i32, {slots}, "batch");
    all_tokens_ = {.num_groups = 1,
                   .counts = state_->tensor(DType::i64, {1}, "batch"),
                   .offsets = state_->tensor(DType::i64, {2}, "batch"),
                   .alignment = kBlock};
    host_tokens_.resize(static_cast<size_t>(slots));
    host_labels_.resize(static_cast<size_t>(slots));
    MoeSpec worst = config.moe;
    worst.moe_expert_rank_capacity_factor = 0.0;
    const int64_t ranks = groups_.expert_parallel->size();
    worst_layer_rows_ = MoeLayer::row_capacity(worst, slots, ranks);
    layer_rows_ = MoeLayer::row_capacity(config.moe, slots, ranks);
}

Trainer::~Trainer() = default;

template <class T> T Trainer::read_word(const TensorView& word) const {
    T value{};
    ops_->device().copy_out(&value, word.data, sizeof value);
    return value;
}

Context Trainer::make_context(int64_t micro_batch) {
    if (!rows_) {
        const bool one_layer =
            config_.recompute.recompute_granularity == RecomputeGranularity::full || config_.recompute.moe;
        const int64_t layers = std::max<int64_t>(1, transformer_->num_moe_layers());
        rows_ =
            std::make_unique<RowArena>(ops_->device(), layer_rows_ * (one_layer ? 1 : layers), layers + 1);
    }
    Context ctx{.ops = *ops_,
                .exchange = *exchange_,
                .saved = *saved_,
                .scratch = *scratch_,
                .rows = *rows_,
                .timer = timer_,
                .activation = transformer_->activation()};
    ctx.seq_length = config_.model.seq_length;
    ctx.tokens_per_rank = batcher_.samples(step_, micro_batch, 0).count * ctx.seq_length;
    ctx.tokens = batcher_.samples(step_, micro_batch, world_.rank()).count * ctx.seq_length;
    for (int r = 0; r < world_.size(); ++r)
        ctx.global_tokens += batcher_.samples(step_, micro_batch, r).count * ctx.seq_length;
    ctx.num_micro_batches = batcher_.num_micro_batches();
    ctx.micro_batch = micro_batch;
    ctx.data_parallel_size = world_.size();
    ctx.layer_row_capacity = layer_rows_;
    ctx.grad_mode = micro_batch == 0 ? Gradient::overwrite : Gradient::accumulate;
    ctx.step_status = status_;
    ctx.tensor_stats = tensor_stats_;
    ctx.all_tokens = all_tokens_;
    ctx.all_tokens.row_capacity = ctx.tokens;
    return ctx;
}

void Trainer::load_batch(Context& ctx, Split split, int64_t global_batch, int64_t micro_batch,
                         TensorView& tokens, TensorView& labels) {
    auto timed = ctx.stage("data");
    const Batcher::Range range = batcher_.samples(global_batch, micro_batch, world_.rank());
    const int64_t seq = ctx.seq_length;
    std::vector<int32_t> window(static_cast<size_t>(seq + 1));
    for (int64_t i = 0; i < range.count; ++i) {
        data_->sample(split, range.first + i, window);
        std::copy_n(window.begin(), seq, host_tokens_.begin() + i * seq);
        std::copy_n(window.begin() + 1, seq, host_labels_.begin() + i * seq);
    }
    const int64_t count = range.count * seq;
    const int64_t group[3] = {count, 0, count};
    Device& device = ops_->device();
    device.copy_in(tokens_.data, host_tokens_.data(), static_cast<size_t>(count) * sizeof(int32_t));
    device.copy_in(labels_.data, host_labels_.data(), static_cast<size_t>(count) * sizeof(int32_t));
    device.copy_in(all_tokens_.counts.data, &group[0], sizeof(int64_t));
    device.copy_in(all_tokens_.offsets.data, &group[1], 2 * sizeof(int64_t));
    tokens = tokens_.slice(0, count);
    labels = labels_.slice(0, count);
}

void Trainer::run_micro_batches() {
    ops_->zero({.y = status_});
    ops_->zero({.y = loss_sum_});
    const float loss_scale =
        1.0f / static_cast<float>(config_.training.global_batch_size * config_.model.seq_length);
    for (int64_t m = 0; m < batcher_.num_micro_batches(); ++m) {
        Context ctx = make_context(m);
        if (m == 0) transformer_->begin_step(ctx);
        TensorView tokens, labels;
        load_batch(ctx, Split::train, step_, m, tokens, labels);
        transformer_->train_micro_batch(ctx, tokens, labels, loss_scale, loss_sum_);
    }
    timer_.set_direction("update");
    Context ctx = make_context(batcher_.num_micro_batches() - 1);
    optimizer_->step(ctx, transformer_->parameters(), loss_sum_, step_);
    transformer_->end_step(ctx, step_);
}

void Trainer::grow_rows() {
    require(layer_rows_ < worst_layer_rows_, ExitCode::internal,
            "routed rows exceed the worst case of {} rows a layer", worst_layer_rows_);
    layer_rows_ = std::min(worst_layer_rows_, layer_rows_ * 2);
    rows_.reset();
}

StepResult Trainer::step() {
    const auto start = std::chrono::steady_clock::now();
    world_.set_activity(fmt::format("step {}", step_ + 1));
    timer_.reset();
    ops_->reset_counts();
    exchange_->reset_counts();
    saved_->reset_peak();
    scratch_->reset_peak();
    StepResult result;
    result.step = step_;
    for (;;) {
        run_micro_batches();
        const int32_t status = read_word<int32_t>(status_);
        if (status == 0) break;
        if (status == op::kStepNonFinite) report_non_finite();
        grow_rows();
        ++result.redone;
    }
    result.tokens = config_.training.global_batch_size * config_.model.seq_length;
    result.lm_loss = read_word<float>(loss_sum_) / static_cast<double>(result.tokens);
    result.grad_norm = read_word<float>(optimizer_->grad_norm());
    result.learning_rate = learning_rate(config_.training, step_);
    read_router_statistics(result);
    result.stage_seconds = timer_.seconds();
    result.wire = exchange_->wire_bytes();
    result.casts = ops_->num_casts();
    result.peak_bytes = saved_->peak_bytes() + scratch_->peak_bytes() + rows_->reserved_bytes();
    ++step_;
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return result;
}

void Trainer::read_router_statistics(StepResult& result) {
    int layer = 0;
    std::vector<float> losses;
    for (const auto& block : transformer_->blocks()) {
        if (const Router* router = block->router()) {
            std::vector<int64_t> counts(static_cast<size_t>(config_.moe.num_experts));
            ops_->device().copy_out(counts.data(), router->step_counts().data,
                                    counts.size() * sizeof(int64_t));
            result.load.push_back(load_of(layer, counts));
            losses.push_back(read_word<float>(router->balancing_loss()));
            losses.push_back(read_word<float>(router->z_loss()));
        }
        ++layer;
    }
    world_.all_reduce_sum(std::span<float>(losses));
    for (size_t i = 0; i + 1 < losses.size(); i += 2) {
        result.balancing_loss += losses[i];
        result.z_loss += losses[i + 1];
    }
}

double Trainer::evaluate(int64_t batches) {
    world_.set_activity(fmt::format("evaluation after step {}", step_));
    Arena words(ops_->device(), "evaluation");
    const TensorView loss = words.tensor(DType::f32, {1}, "evaluation");
    double sum = 0;
    for (int64_t b = 0; b < batches; ++b)
        for (int64_t m = 0; m < batcher_.num_micro_batches(); ++m) sum += evaluate_micro_batch(b, m, loss);
    world_.all_reduce_sum(std::span<double>(&sum, 1));
    require(std::isfinite(sum), ExitCode::numeric, "the held-out loss after step {} is not finite", step_);
    return sum / static_cast<double>(batches * config_.training.global_batch_size * config_.model.seq_length);
}

// This rank's sum of losses. Like a step, it is done again where a rank ran out of rows.
double Trainer::evaluate_micro_batch(int64_t batch, int64_t micro_batch, const TensorView& loss) {
    for (;;) {
        timer_.set_direction("evaluation");
        Context ctx = make_context(micro_batch);
        ctx.tensor_stats = nullptr;
        TensorView tokens, labels;
        load_batch(ctx, Split::held_out, batch, micro_batch, tokens, labels);
        ops_->zero({.y = status_});
        ops_->zero({.y = loss});
        transformer_->evaluate(ctx, tokens, labels, loss);
        exchange_->all_reduce(Reduce::max, Ranks::world, status_);
        if (read_word<int32_t>(status_) == 0) return read_word<float>(loss);
        grow_rows();
    }
}

// The first tensor with a NaN or Inf, weights before gradients, low ranks before high ones. All ranks agree on it, since a bad weight of
// one rank spoils gradients everywhere.
void Trainer::report_non_finite() {
    struct Finding {
        int64_t kind = 2;  // 0: a weight, 1: a gradient, 2: none
        int64_t parameter = 0, count = 0, first = 0;
    };
    Arena words(ops_->device(), "search");
    const TensorView count = words.tensor(DType::i64, {1}, "search"),
                     first = words.tensor(DType::i64, {1}, "search");
    const auto& parameters = transformer_->parameters().all();
    const auto search = [&](int64_t kind) {
        for (size_t i = 0; i < parameters.size(); ++i) {
            const Parameter& p = parameters[i];
            const int64_t zero = 0, none = -1;
            ops_->device().copy_in(count.data, &zero, sizeof zero);
            ops_->device().copy_in(first.data, &none, sizeof none);
            ops_->count_non_finite({.x = kind == 0 ? p.master : p.main_grad, .count = count, .first = first});
            const int64_t found = read_word<int64_t>(count);
            if (found == 0) continue;
            const int64_t offset = p.spec.expert ? p.spec.first_expert * (p.numel() / p.spec.shape[0]) : 0;
            return Finding{kind, static_cast<int64_t>(i), found, offset + read_word<int64_t>(first)};
        }
        return Finding{};
    };
    Finding mine = search(0);
    if (mine.kind == 2) mine = search(1);
    std::vector<Finding> all(static_cast<size_t>(world_.size()));
    world_.all_gather(&mine, sizeof mine, all.data());
    const auto worst = std::min_element(all.begin(), all.end(),
                                        [](const auto& a, const auto& b) { return a.kind < b.kind; });
    if (worst->kind == 2)
        fail(ExitCode::numeric,
             "step {}: the loss or the norm of the gradients is not finite, though every weight and gradient "
             "is; the step was not applied; lower training.lr",
             step_ + 1);
    const std::string& name = parameters[static_cast<size_t>(worst->parameter)].spec.name;
    fail(ExitCode::numeric,
         "step {}: rank {}: {}{} has {} values that are not finite, the first at index {}; the step was not "
         "applied{}",
         step_ + 1, worst - all.begin(), worst->kind == 0 ? "" : "the gradient of ", name, worst->count,
         worst->first, worst->kind == 0 ? "" : "; lower training.lr or check the data");
}

std::map<std::string, int64_t> Trainer::saved_bytes() const {
    std::map<std::string, int64_t> bytes = saved_->peak_by_category();
    if (!rows_) return bytes;
    for (const auto& [kind, per_row] : rows_->bytes_per_row())
        bytes["routed rows: " + kind] =
            static_cast<int64_t>(per_row * static_cast<double>(rows_->capacity()));
    return bytes;
}

int64_t Trainer::allocations() const {
    return saved_->num_growths() + scratch_->num_growths() + (rows_ ? rows_->num_growths() : 0);
}

}  // namespace fp8flow
