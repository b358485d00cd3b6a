// SPDX-License-Identifier: MIT
// One training step as a list: batch, forward, backward, reductions, update, statistics.
#include "model/train/trainer.h"

#include "kernels/core/random.h"
#include "kernels/core/stochastic_rounding.h"
#include "layers/schedule/wire_stream.h"
#include "model/data/blend.h"
#include "model/data/megatron.h"
#include "model/data/permutation.h"
#include "model/data/shards.h"
#include "model/data/synthetic.h"
#include "model/data/text.h"
#include "model/job/watchdog.h"
#include "model/train/forced_routing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace fp8flow {

using namespace data;

LayerLoad load_of(int layer, std::span<const int64_t> tokens) {
    LayerLoad load;
    load.layer = layer;
    const double mean = f64(std::accumulate(tokens.begin(), tokens.end(), int64_t{0})) / f64(tokens.size());
    if (mean <= 0) return load;
    double squares = 0;
    for (int64_t count : tokens) squares += (f64(count) / mean - 1.0) * (f64(count) / mean - 1.0);
    load.max = f64(*std::ranges::max_element(tokens)) / mean;
    load.min = f64(*std::ranges::min_element(tokens)) / mean;
    load.cv = std::sqrt(squares / f64(tokens.size()));
    load.dead_experts = std::ranges::count(tokens, 0);
    load.tokens.assign(tokens.begin(), tokens.end());
    return load;
}

double RouterLoss::mean() const {
    const double sum = std::accumulate(by_layer.begin(), by_layer.end(), 0.0);
    return by_layer.empty() ? 0 : sum / f64(by_layer.size());
}

namespace {

StateShards shards_of(const Config& config, const RankGroups& groups) {
    if (!config.training.use_distributed_optimizer) return {};
    const auto place = [](const ProcessGroup& group) {
        return StateShards::GroupRank{group.rank(), group.size()};
    };
    return {.dense = place(*groups.world),
            .expert = place(*groups.expert_replicas),
            .whole_expert_gradients = config.moe.moe_combine_order == CombineOrder::invariant};
}

std::shared_ptr<const TokenSource> make_source(const Config& config) {
    const DataSpec& d = config.data;
    if (const auto blend = blend_of(d.data_path); !blend.empty()) {
        std::vector<BlendedSource::Part> parts;
        for (const WeightedPath& of : blend) {
            Config part = config;
            part.data.data_path = {of.path};
            part.training.seed = mix64(config.training.seed, parts.size());
            parts.push_back({of, make_source(part)});
        }
        return std::make_shared<BlendedSource>(std::move(parts));
    }
    switch (d.data_kind) {
        case DataKind::text:
            require(config.imported.empty() || config.model.vocab_size == kByteVocabulary, ExitCode::usage,
                    "data.data_kind: got text for {} with model.vocab_size {}, want {} with it: {}",
                    config.imported, config.model.vocab_size, kByteVocabulary, kTextIsBytes);
            return std::make_shared<TextSource>(config);
        case DataKind::synthetic: return std::make_shared<SyntheticSource>(config);
        case DataKind::shards: return std::make_shared<ShardSource>(config);
        case DataKind::megatron: return std::make_shared<MegatronSource>(config);
    }
    fail(ExitCode::internal, "unknown data kind {}", static_cast<int>(d.data_kind));
}

}  // namespace

std::shared_ptr<const TokenSource> open_data(const Config& config) {
    auto source = make_source(config);
    // Checked now, not after the last step.
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
      batcher_{config.training.global_batch_size, config.training.micro_batch_size, world.size()},
      limits_(config.training) {
    ExchangeChoice exchange = make_exchange(backend, groups_, *ops_, config);
    exchange_ = std::move(exchange.exchange);
    exchange_note_ = std::move(exchange.note);

    // Ranks with different data or configurations would diverge silently.
    const uint64_t mine = data_->fingerprint() ^ fnv1a64(dump_config(config_));
    std::vector<uint64_t> all(to_size(world.size()));
    world.all_gather(&mine, sizeof mine, all.data());
    for (size_t r = 0; r < all.size(); ++r)
        require(all[r] == all[0], ExitCode::peer,
                "rank {} has other data or another configuration than rank 0; make data.data_path and the "
                "keys the same",
                r);

    Device& device = ops_->device();
    transformer_ = std::make_unique<Transformer>(
        TransformerSpec{.block = {.model = config.model,
                                  .moe = with_forced_routing(config.moe),
                                  .precision = config.precision,
                                  .recompute = config.recompute,
                                  .expert_parallel_rank = groups_.expert_parallel->rank(),
                                  .expert_parallel_size = groups_.expert_parallel->size()},
                        .seed = config.training.seed,
                        .state = config.training.state,
                        .shards = shards_of(config, groups_),
                        .freeze = config.training.freeze},
        *ops_);
    optimizer_ = std::make_unique<Optimizer>(config.training, config.moe.moe_combine_order, device);
    state_ = std::make_unique<Arena>(device, "step");
    if (config.schedule.overlap_moe_expert_parallel_comm && batcher_.num_micro_batches() > 1)
        pair_ = std::make_unique<InterleavedPair>(device);
    join_wgrads(config.precision.moe_wgrad_micro_batches);
    if (config.schedule.has_side_stream()) side_ = std::make_unique<SideStream>(device, config.schedule);
    if (config.schedule.overlaps()) wire_ = std::make_unique<WireStream>(device, config.schedule);

    const int64_t slots = batcher_.samples(0, 0, 0).count * config.model.seq_length;
    const int64_t batches = kStepsInFlight * batcher_.num_micro_batches();  // page-locked
    status_ = state_->tensor(DType::i32, {1}, "step");
    held_out_sum_ = state_->tensor(DType::f32, {1}, "step");
    ops_->zero({.y = status_});
    inputs_ = std::make_unique<StepInputs>(device, kStepsInFlight);
    held_out_ = std::make_unique<PinnedBuffer>(device, to_size(batches) * sizeof(HeldOut));
    for (auto& event : held_out_events_) event = std::make_unique<HostEvent>(device);
    if (config.schedule.cuda_graph_impl == CudaGraphImpl::full_iteration && device.can_capture()) {
        exchange_->require_capturable();
        stream_ = device.make_ordered_stream();
        captured_ = std::make_unique<CapturedSteps>(device, kStepsInFlight);
        captured_evaluations_ = std::make_unique<CapturedSteps>(device, batches);
    }
    for (int i = 0; i < (pair_ ? 2 : 1); ++i)
        memory_.push_back(std::make_unique<Memory>(device, config.model.seq_length, slots, batches));
    if (!config.data.routing_path.empty() || !config.output.record_routing.empty())
        routing_ =
            std::make_unique<StepRouting>(device, config, order_fingerprint(*data_),
                                          StepRouting::Sizes{.samples = batcher_.samples(0, 0, 0).count,
                                                             .slots = batches,
                                                             .buffers = std::ssize(memory_)});
    for (auto& record : records_)
        record = std::make_unique<StepRecord>(device, transformer_->router_counts(),
                                              transformer_->router_losses());
    const int64_t ranks = groups_.expert_parallel->size();
    capacity_ = rows_of_layers(MoeLayer::row_capacity(config.moe, slots, ranks));
    worst_capacity_ = rows_of_layers(MoeLayer::worst_rows(config.moe, slots, ranks));
}

// Waits for copies to page-locked memory that is freed now.
Trainer::~Trainer() {
    try {
        ops_->device().synchronize();
    } catch (const Error&) {  // the device is lost, and was reported
    }
    if (stream_.handle != nullptr) ops_->device().free_stream(stream_);
}

void Trainer::time_stages(TimerDetail detail) {
    FP8FLOW_CHECK(flights_.empty(), "stage timer switched with {} steps in flight", flights_.size());
    for (StageTimer& timer : timers_) {
        timer.watch(arenas());
        if (detail == TimerDetail::off)
            timer.disable();
        else
            timer.enable(ops_->device().make_timeline(), detail);
    }
}

void Trainer::run_passes_alone(bool alone) {
    FP8FLOW_CHECK(flights_.empty(), "work of a step switched with {} steps in flight", flights_.size());
    passes_alone_ = alone;
    if (captured_) captured_->forget();
}

Context Trainer::make_context(int64_t micro_batch, StageTimer& timer) {
    Memory& memory = memory_of(micro_batch);
    if (!memory.rows)
        memory.rows = std::make_unique<RowArena>(ops_->device(), capacity_.together,
                                                 std::max<int64_t>(1, transformer_->num_moe_layers()) + 1);
    Context ctx{{.ops = *ops_,
                 .exchange = *exchange_,
                 .saved = memory.saved,
                 .scratch = memory.scratch,
                 .rows = *memory.rows,
                 .timer = timer},
                {.activation = transformer_->activation()}};
    ctx.seq_length = config_.model.seq_length;
    ctx.tokens_per_rank = batcher_.samples(0, micro_batch, 0).count * ctx.seq_length;
    ctx.tokens = batcher_.samples(0, micro_batch, world_.rank()).count * ctx.seq_length;
    for (int r = 0; r < world_.size(); ++r)
        ctx.global_tokens += batcher_.samples(0, micro_batch, r).count * ctx.seq_length;
    ctx.num_micro_batches = batcher_.num_micro_batches();
    ctx.micro_batch = micro_batch;
    ctx.data_parallel_size = world_.size();
    ctx.layer_row_capacity = capacity_.layer;
    ctx.known_rows = known_rows_.empty() ? nullptr : &known_rows_;
    ctx.grad_mode = micro_batch == 0 ? Gradient::overwrite : Gradient::accumulate;
    ctx.delayed = delayed_.get();
    ctx.side = side_.get();
    ctx.wire = wire_.get();
    ctx.reduces_gradients = config_.schedule.overlap_grad_reduce && !passes_alone_ &&
                            micro_batch == batcher_.num_micro_batches() - 1;
    ctx.overlaps_param_gather = config_.schedule.overlap_param_gather && !passes_alone_;
    ctx.sums_squares = config_.moe.moe_combine_order == CombineOrder::rank &&
                       micro_batch == batcher_.num_micro_batches() - 1 &&
                       exchange_->num_ranks(Ranks::expert_replicas) == 1;
    ctx.rounding = {.seed = config_.training.seed,
                    .step = inputs_->rounding(),
                    .replica = world_.rank() / groups_.expert_parallel->size()};
    ctx.step_status = status_;
    ctx.launch.stream = stream_;
    ctx.launch.shared_device = config_.schedule.gemm_tile_queue;
    ctx.all_tokens = memory.feed.all_tokens();
    ctx.all_tokens.row_capacity = ctx.tokens;
    if (routing_) routing_->place(ctx);
    return ctx;
}

void Trainer::fill_batch(Split split, int64_t global_batch, int64_t micro_batch, int64_t slot) {
    const Batcher::Range samples = batcher_.samples(global_batch, micro_batch, world_.rank());
    memory_of(micro_batch).feed.fill(*data_, split, samples, slot);
    if (routing_ && split == Split::train) routing_->fill(samples, slot);
}

BatchFeed::Batch Trainer::load_batch(Context& ctx, int64_t slot) {
    return memory_of(ctx.micro_batch)
        .feed.load(batcher_.samples(0, ctx.micro_batch, world_.rank()).count, slot, ctx.launch.stream);
}

Transformer::MicroBatch Trainer::load_micro_batch(Context& ctx, const Flight& flight) {
    note_progress();
    ctx.tensor_stats = flight.tensor_stats;
    if (ctx.tensor_stats != nullptr) ctx.side = nullptr;  // it reads tensors where they are made
    ctx.timer.set_direction("forward");
    auto timed = ctx.part("data");
    const int64_t slot = batch_slot(flight, ctx.micro_batch);
    if (!captured_) fill_batch(Split::train, flight.step + first_batch_, ctx.micro_batch, slot);
    const BatchFeed::Batch batch = load_batch(ctx, slot);
    if (routing_) routing_->load(ctx, slot);
    return {.tokens = batch.tokens,
            .labels = batch.labels,
            .loss_scale = 1.0f / static_cast<float>(tokens_of_step()),
            .loss_sum = inputs_->sums().slice(0, 1)};
}

void Trainer::run_micro_batches(const Flight& flight) {
    inputs_->load(static_cast<int64_t>(slot_of(flight.step)), stream_);
    const int64_t micro_batches = batcher_.num_micro_batches();
    Context end = make_context(micro_batches - 1, timer_of(flight));
    transformer_->begin_step(end);
    if (pair_ && flight.tensor_stats == nullptr) {
        run_interleaved(flight);
    } else {
        for (int64_t m = 0; m < micro_batches; ++m) {
            Context ctx = make_context(m, timer_of(flight));
            Transformer::MicroBatch batch = load_micro_batch(ctx, flight);
            transformer_->forward(ctx, batch);
            transformer_->backward(ctx, batch);
        }
    }
    if (end.wire != nullptr) end.wire->join(end);
    end.wire = nullptr;
    end.timer.set_direction("update");
    if (passes_alone_) return optimizer_->agree_on_status(end, *inputs_);
    optimizer_->step(end, transformer_->parameters(), *inputs_);
    transformer_->end_step(end, inputs_->update());
}

StepInputs::Values Trainer::inputs_of(const Flight& flight) const {
    const double loss_limit = flight.loss_limit * f64(tokens_of_step());
    return {.update = update_of(flight),
            .rounding = rounding_step(config_.training.seed, flight.step),
            .schedule = adamw_schedule(config_.training, update_of(flight)),
            .loss_limit = static_cast<float>(std::sqrt(loss_limit)),
            .grad_norm_limit = static_cast<float>(config_.training.grad_norm_limit),
            .sums = {0.0f, stop_asked_ && stop_asked_() ? 1.0f : 0.0f}};
}

// The forward of a micro-batch runs in parallel with the backward of the previous one. The first and the last
// half pass run alone.
void Trainer::run_interleaved(const Flight& flight) {
    const int64_t micro_batches = batcher_.num_micro_batches();
    std::vector<Transformer::MicroBatch> batches(to_size(micro_batches));
    const auto pass = [&](int64_t m, InterleavedMicroBatch* interleaved, auto half) {
        Context ctx = make_context(m, timer_of(flight));
        ctx.interleaved = interleaved;
        half(ctx, batches[to_size(m)]);
    };
    const auto forward = [&](Context& ctx, Transformer::MicroBatch& batch) {
        batch = load_micro_batch(ctx, flight);
        transformer_->forward(ctx, batch);
    };
    const auto backward = [&](Context& ctx, Transformer::MicroBatch& batch) {
        transformer_->backward(ctx, batch);
    };
    pass(0, nullptr, forward);
    for (int64_t m = 1; m < micro_batches; ++m)
        pair_->run(
            timer_of(flight), [&](InterleavedMicroBatch& next) { pass(m, &next, forward); },
            [&](InterleavedMicroBatch& previous) { pass(m - 1, &previous, backward); });
    pass(micro_batches - 1, nullptr, backward);
}

std::optional<StepResult> Trainer::step() {
    Flight& flight = flights_.emplace_back();
    flight.step = next_step_++;
    flight.tensor_stats = tensor_stats_;
    flight.loss_limit = limits_.loss_of(flight.step);
    flight.launched = clock_seconds();
    launch(flight);
    if (std::ssize(flights_) < kStepsInFlight) return std::nullopt;
    return take_result();
}

std::optional<StepResult> Trainer::drain() {
    if (flights_.empty()) return std::nullopt;
    return take_result();
}

StepResult Trainer::run_step() {
    FP8FLOW_CHECK(flights_.empty(), "run_step with {} steps in flight", flights_.size());
    step();
    return take_result();
}

void Trainer::weights_replaced() {
    FP8FLOW_CHECK(flights_.empty(), "weights replaced with {} steps in flight", flights_.size());
    transformer_->parameters().write_all_copies(*exchange_);
    ops_->device().synchronize();
    exchange_->check_peers();
}

void Trainer::resume_at(int64_t steps, int64_t applied) {
    FP8FLOW_CHECK(flights_.empty(), "resumed with {} steps in flight", flights_.size());
    weights_replaced();
    next_step_ = steps;
    skipped_ = steps - applied;
    limits_ = DivergenceLimits(config_.training);
    skipped_in_a_row_ = 0;
}

void Trainer::join_wgrads(int64_t micro_batches) {
    if (micro_batches < 2)
        delayed_.reset();
    else if (!delayed_ || delayed_->joined() != micro_batches)
        delayed_ = std::make_unique<DelayedWgrads>(ops_->device(), micro_batches);
}

void Trainer::follow_rules_of(const Config& config) {
    config_.training.lr_warmup_style = config.training.lr_warmup_style;
    config_.moe.moe_global_aux_loss_gradient = config.moe.moe_global_aux_loss_gradient;
    config_.precision.moe_wgrad_micro_batches = config.precision.moe_wgrad_micro_batches;
    join_wgrads(config.precision.moe_wgrad_micro_batches);
    for (const auto& block : transformer_->blocks())
        if (Router* router = block->router())
            router->set_global_loss_gradient(config.moe.moe_global_aux_loss_gradient);
}

void Trainer::launch(Flight& flight) {
    world_.set_activity(fmt::format("step {}", flight.step + 1));
    note_stage(Stage::step, flight.step + 1);
    StageTimer& timer = timer_of(flight);
    timer.reset();
    ops_->observe(timer.enabled() ? &timer : nullptr);
    exchange_->observe(timer.enabled() ? &timer : nullptr);
    if (flight.tensor_stats != nullptr) flight.tensor_stats->begin_iteration(flight.step + 1);
    if (routing_)
        routing_->open(world_, {.continues = flight.step > 0,
                                .skipped_samples = first_batch_ * config_.training.global_batch_size});
    const double begin = clock_seconds();
    const int64_t stops = ops_->device().num_synchronisations();
    for (Arena* arena : arenas()) arena->join();
    inputs_->write(static_cast<int64_t>(slot_of(flight.step)), inputs_of(flight));
    if (captured_)
        for (int64_t m = 0; m < batcher_.num_micro_batches(); ++m)
            fill_batch(Split::train, flight.step + first_batch_, m, batch_slot(flight, m));
    // A stage timer or --tensor-stats needs the step operation by operation, not as a graph.
    const auto work = [&] { return give_work(flight); };
    const bool as_graph = captured_ && flight.tensor_stats == nullptr && !timer.enabled();
    const CapturedSteps::Known known =
        as_graph ? captured_->run(slot_of(flight.step), allocations(), stream_, work) : work();
    flight.result.casts = known.casts;
    flight.result.peak_bytes = known.peak_bytes;
    if (flight.tensor_stats != nullptr) flight.tensor_stats->end_iteration();
    flight.begun = begin;
    StepRecord& record = record_of(flight);
    record.mark(stream_);
    flight.result.host_seconds = clock_seconds() - begin;
    flight.result.host_stops = ops_->device().num_synchronisations() - stops;
    // Steps that the device finished while this one was launched: the host is the bottleneck, so a step takes
    // as long as a launch.
    for (Flight& earlier : flights_)
        if (&earlier != &flight && !earlier.ended && record_of(earlier).has_passed())
            earlier.ended = flight.launched;
    // on the host a step has ended when it is launched
    flight.ended = record.has_passed() ? std::optional(clock_seconds()) : std::nullopt;
}

CapturedSteps::Known Trainer::give_work(const Flight& flight) {
    ops_->reset_counts();
    for (Arena* arena : arenas()) arena->reset_peak();
    StepRecord& record = record_of(flight);
    const Launch launch{.stream = stream_};
    record.begin(*exchange_, launch);
    run_micro_batches(flight);
    record.end({.status = status_, .sums = inputs_->sums(), .grad_norm = optimizer_->grad_norm()}, *exchange_,
               launch);
    CapturedSteps::Known known{.casts = ops_->num_casts()};
    for (const auto& memory : memory_) known.peak_bytes += memory->rows->reserved_bytes();
    for (const Arena* arena : arenas()) known.peak_bytes += arena->peak_bytes();
    return known;
}

int32_t Trainer::wait_for(Flight& flight) {
    world_.set_activity(fmt::format("step {}", flight.step + 1));  // a lost peer was lost here
    record_of(flight).wait();
    if (!flight.ended) flight.ended = clock_seconds();
    exchange_->check_peers();
    return record_of(flight).status();
}

StepResult Trainer::take_result() {
    for (int32_t status = wait_for(flights_.front()); status != 0; status = wait_for(flights_.front())) {
        if (status == op::kStepOverflow)
            redo();
        else if (config_.training.on_divergence == OnDivergence::skip &&
                 skipped_in_a_row_ < kMostSkippedInARow)
            return skip_step();
        else
            give_up();
    }
    StepResult result = result_of(flights_.front());
    flights_.pop_front();
    limits_.accept(result.step, result.lm_loss);
    skipped_in_a_row_ = 0;
    return result;
}

StepResult Trainer::result_of(const Flight& flight) {
    const StepRecord& record = record_of(flight);
    StepResult result = flight.result;
    result.step = flight.step;
    result.batch = flight.step + first_batch_;
    result.grad_norm = record.grad_norm();
    result.learning_rate = learning_rate(config_.training, update_of(flight));
    result.seconds = *flight.ended - std::max(flight.launched, last_end_);
    result.tokens = tokens_of_step();
    result.wire = record.wire();
    result.stop_asked = record.stop_asked();
    last_end_ = *flight.ended;
    if (StageTimer& timer = timer_of(flight); timer.enabled()) {
        timer.resolve();
        result.stage_seconds = timer.seconds();
    }
    result.lm_loss = mean_loss(record);
    int64_t moe_layer = 0;
    for (size_t i = 0; i < transformer_->blocks().size(); ++i) {
        if (!transformer_->blocks()[i]->is_moe()) continue;
        result.load.push_back(load_of(static_cast<int>(i), record.expert_counts(moe_layer)));
        result.balancing_loss += f64(record.router_losses(moe_layer)[0]);
        result.z_loss += f64(record.router_losses(moe_layer)[1]);
        ++moe_layer;
    }
    result.router_losses = router_losses_of(record);
    if (routing_) keep_routing(flight, result.load);
    return result;
}

// All ranks compare in the same steps.
void Trainer::keep_routing(const Flight& flight, std::vector<LayerLoad>& load) {
    const bool compares = routing_->gives() && (flight.step + 1) % config_.output.log_interval == 0;
    std::vector<int64_t> equal(compares ? load.size() : 0);
    for (int64_t m = 0; m < batcher_.num_micro_batches(); ++m)
        routing_->keep(batcher_.samples(flight.step + first_batch_, m, world_.rank()), batch_slot(flight, m),
                       equal);
    if (!compares) return;
    world_.all_reduce_sum(equal);
    for (size_t i = 0; i < load.size(); ++i)
        load[i].equal_choices = f64(equal[i]) / f64(tokens_of_step() * config_.moe.moe_router_topk);
}

std::vector<RouterLoss> Trainer::router_losses_of(const StepRecord& record) const {
    std::vector<RouterLoss> losses;
    const auto add = [&](const char* name, size_t word, double weight) {
        if (weight == 0 || record.num_layers() == 0) return;
        RouterLoss& loss = losses.emplace_back(RouterLoss{.name = name, .by_layer = {}});
        for (int64_t layer = 0; layer < record.num_layers(); ++layer)
            loss.by_layer.push_back(f64(record.router_losses(layer)[word]) / weight);
    };
    constexpr std::array kNames = {"load_balancing_loss", "seq_load_balancing_loss",
                                   "global_load_balancing_loss"};
    const MoeSpec& moe = config_.moe;
    for (size_t i = 0; i < moe.moe_router_load_balancing_type.size(); ++i) {
        const BalancingLoss type = moe.moe_router_load_balancing_type[i];
        const bool averaged = type == BalancingLoss::global_aux_loss &&
                              moe.moe_global_aux_loss_gradient == GlobalLossGradient::mean;
        add(kNames[to_size(type)], 2 + i, moe.moe_aux_loss_coeff[i] / (averaged ? world_.size() : 1));
    }
    add("z_loss", 1, moe.moe_z_loss_coeff);
    return losses;
}

void Trainer::launch_again() {
    ops_->zero({.y = status_});
    for (Flight& flight : flights_) launch(flight);
}

// The steps after it, which were not applied either, are launched again from the state before it.
StepResult Trainer::skip_step() {
    for (Flight& flight : flights_) wait_for(flight);
    StepResult result = result_of(flights_.front());
    result.skipped = reason_of(flights_.front());
    if (TensorStats* stats = flights_.front().tensor_stats; stats != nullptr)
        stats->forget_from(result.step + 1);
    flights_.pop_front();
    ++skipped_;
    ++skipped_in_a_row_;
    launch_again();
    return result;
}

// If another step ran after the one that diverged, its gradients have replaced the bad ones, so they are
// computed again.
void Trainer::give_up() {
    for (Flight& flight : flights_) wait_for(flight);
    if (flights_.size() > 1) {
        flights_.resize(1);
        launch_again();
        wait_for(flights_.front());
    }
    const Flight flight = flights_.front();
    flights_.clear();
    next_step_ = flight.step;
    ops_->zero({.y = status_});
    transformer_->parameters().gather_gradients(*exchange_);
    if (record_of(flight).status() == op::kStepNonFinite) report_non_finite(flight.step);
    const std::string before =
        skipped_in_a_row_ > 0 ? fmt::format(", nor were {} before it", skipped_in_a_row_) : std::string();
    throw Diverged(flight.step,
                   fmt::format("step {}: {}; the largest gradient is that of {}; the step was not applied{}; "
                               "lower training.lr, or see training.on_divergence",
                               flight.step + 1, reason_of(flight), largest_gradient(), before));
}

}  // namespace fp8flow
