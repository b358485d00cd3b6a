// SPDX-License-Identifier: MIT
// Runs a recipe three times: with every stage timed, with whole layers timed and no marks between stages, and
// with whole steps timed.
#include "model/profile/run.h"

#include "model/plan/plan.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>

namespace fp8flow::profile {

using namespace data;
using namespace plan;
using namespace validate;

namespace {

// Of one MoE layer, forward and backward, as a model's FLOPs are counted: router, top-k experts and shared
// expert of every token.
double useful_flops(const Config& config, double tokens) {
    double flops = 0;
    for (const FlopPart& part : count_flops(config))
        if (part.part == "router" || part.part == "experts" || part.part == "shared expert")
            flops += part.forward + part.backward;
    return tokens * flops / f64(num_moe_layers(config));
}

// How even routing divides the bytes of dispatch and combine between the passes.
WireSplit wire_split(const Config& config) {
    const std::vector<WireItem> items = wire_bytes(config);  // routing, dispatch, combine, prob gradients
    return {.dispatch_forward = items[1].forward,
            .dispatch_backward = items[1].forward,  // of one call: saved_rows none has two
            .combine_forward = items[2].forward,
            .combine_backward = items[2].backward + items[3].backward};
}

class ArmRun {
public:
    ArmRun(const Arm& arm, ProcessGroup& world, const BackendChoice& backend,
           const std::shared_ptr<const TokenSource>& data, const EnergyCounter& energy, const OnStep& on_step)
        : config_(arm.config),
          world_(world),
          backend_(backend),
          energy_(energy),
          trainer_(std::make_unique<Trainer>(arm.config, world, backend, arm.arithmetic, data)),
          on_step_(on_step) {
        result_.name = arm.name;
        result_.recipe = recipe_name(arm.config.precision);
        result_.exchange = trainer_->exchange_note();
        result_.num_hosts = num_hosts(world, config_.parallel);
        result_.tokens = f64(config_.training.micro_batch_size * config_.model.seq_length);
        result_.useful_flops = useful_flops(config_, result_.tokens);
        result_.step_tokens = f64(config_.training.global_batch_size * config_.model.seq_length);
    }

    void warm_up() {
        run_steps("warm-up", config_.profile.profile_step_start,
                  [&](const StepResult& step) { result_.redone += step.redone > 0; });
        read_rows();
        result_.padding_share = trainer_->padding_share();
    }

    void time_stages() {
        trainer_->time_stages(TimerDetail::stages);
        const std::unique_ptr<Timeline> capture = trainer_->ops().device().make_timeline();
        capture->begin_capture();
        run_steps("stages", measured_steps(), [&](const StepResult& step) {
            add_step(trainer_->timer(), samples_);
            result_.redone += step.redone > 0;
            result_.trace = trainer_->timer().spans();
            result_.wire = step.wire;
            result_.memory.activations = step.peak_bytes;
        });
        capture->end_capture();
        result_.memory = report::memory_of(*trainer_, result_.memory.activations);
    }

    // Without marks between stages.
    void time_layer() {
        trainer_->time_stages(TimerDetail::parts);
        std::vector<LayerSeconds> own;
        run_steps("layer", measured_steps(),
                  [&](const StepResult&) { own.push_back(layer_seconds(trainer_->timer())); });
        trainer_->time_stages(TimerDetail::off);
        std::vector<double> layer, forward, backward, passes, clock, cycles;
        for (const LayerSeconds& seconds : own) {
            std::array<float, 5> slowest = {
                static_cast<float>(seconds.forward), static_cast<float>(seconds.backward),
                static_cast<float>(seconds.forward + seconds.backward), static_cast<float>(-seconds.clock),
                static_cast<float>(seconds.passes)};
            world_.all_reduce_max(slowest);
            forward.push_back(slowest[0]);
            backward.push_back(slowest[1]);
            layer.push_back(slowest[2]);
            clock.push_back(-slowest[3]);
            cycles.push_back(layer.back() * clock.back());
            passes.push_back(slowest[4]);
        }
        result_.whole = {.layer = spread_of(layer),
                         .forward = spread_of(forward),
                         .backward = spread_of(backward),
                         .passes = spread_of(passes),
                         .clock = spread_of(clock),
                         .cycles = spread_of(cycles),
                         .layer_by_step = layer,
                         .clock_by_step = clock};
    }

    // As training runs them, in graphs where the schedule says so.
    void time_steps() {
        std::vector<double> steps, host;
        int64_t stops = 0;
        run_steps("steps", measured_steps(), [&](const StepResult& step) {
            steps.push_back(step.seconds);
            host.push_back(step.host_seconds);
            stops = std::max(stops, step.host_stops);
        });
        world_.all_reduce_max(std::span<int64_t>(&stops, 1));
        if (backend_.kind == BackendKind::hopper) result_.host_stops = stops;
        result_.step_seconds = spread_of(steps).median;
        result_.seconds_by_step = steps;
        result_.host_seconds = spread_of(host).median;
    }

    // Whole steps, and then the passes alone, for at least the window each.
    void measure_energy() {
        std::vector<float> off = {static_cast<float>(config_.profile.energy_seconds <= 0 || !energy_() ||
                                                     result_.step_seconds <= 0)};
        world_.all_reduce_max(off);
        if (off[0] > 0) return;
        result_.joules_per_step = energy_of_steps(result_.step_seconds).joules;
        trainer_->run_passes_alone(true);
        double fastest = result_.step_seconds;  // the first steps of a schedule with graphs capture them
        constexpr int64_t kWarmUp = 6;
        run_steps(nullptr, kWarmUp,
                  [&](const StepResult& step) { fastest = std::min(fastest, step.seconds); });
        const StepEnergy passes = energy_of_steps(fastest);
        trainer_->run_passes_alone(false);
        result_.passes_joules_per_step = passes.joules;
        result_.passes_step_seconds = passes.seconds;
    }

    // After the model's memory is free again, since the ceilings need some.
    ArmProfile finish(MachineCeilings& ceilings) {
        add_waiting(trainer_->expert_parallel_group(), samples_);
        trainer_.reset();
        charge_wire(result_.wire, wire_split(config_), samples_);
        add_ceilings(
            [&](const OpCall& call, double wire) { return ceilings.bound_of(call.cost, wire).seconds(); },
            samples_);
        result_.rows = merge_rows(samples_, world_);
        for (const ProfileRow& row : result_.rows)
            if (row.part == kMoeLayer) result_.casts += row.casts;
        result_.wire_seconds = wire_seconds(result_.rows);
        const RankSeconds mine = rank_seconds(samples_);
        result_.by_rank.resize(to_size(world_.size()));
        world_.all_gather(&mine, sizeof mine, result_.by_rank.data());
        return std::move(result_);
    }

private:
    // Of one step, all ranks' devices together.
    struct StepEnergy {
        double joules = 0, seconds = 0;
    };
    // Steps back to back, from and to an idle device, in at least the window of the configuration. A GPU's
    // counter is some 10 ms late, so it is read when it has had time to count all that ran. The idle time
    // that this adds to the window takes less than 1 % of the energy of 5 seconds.
    StepEnergy energy_of_steps(double step_seconds) {
        constexpr auto kCounterIsLate = std::chrono::milliseconds(100);
        std::vector<float> slowest = {static_cast<float>(step_seconds)};
        world_.all_reduce_max(slowest);
        const auto steps = static_cast<int64_t>(std::ceil(config_.profile.energy_seconds / f64(slowest[0])));
        std::this_thread::sleep_for(kCounterIsLate);
        world_.barrier();
        const double before = *energy_();
        const double begin = clock_seconds();
        run_steps(nullptr, steps, [](const StepResult&) {});
        const double seconds = clock_seconds() - begin;
        std::this_thread::sleep_for(kCounterIsLate);
        const double mine = *energy_() - before;
        std::vector<double> all(to_size(world_.size()));
        world_.all_gather(&mine, sizeof mine, all.data());
        return {.joules = std::accumulate(all.begin(), all.end(), 0.0) / f64(steps),
                .seconds = seconds / f64(steps)};
    }

    // One step is launched while the one before it runs, as in training. Without a phase the observer sees
    // none.
    void run_steps(const char* phase, int64_t steps, const std::function<void(const StepResult&)>& take) {
        for (int64_t launched = 0, taken = 0; taken < steps; ++launched) {
            const std::optional<StepResult> result = launched < steps ? trainer_->step() : trainer_->drain();
            if (!result) continue;
            take(*result);
            ++taken;
            if (phase != nullptr) on_step_(phase, taken, steps, result->seconds);
        }
    }

    int64_t measured_steps() const {
        return config_.profile.profile_step_end - config_.profile.profile_step_start;
    }

    // Rows of this rank's experts in every layer, from the counts of the last warm-up step (the mean, where
    // several micro-batches or several groups of ranks share them), so that costs count real rows.
    void read_rows() {
        const int64_t experts = config_.moe.num_experts, ranks = config_.parallel.expert_model_parallel_size;
        const int64_t local = experts / ranks, own = world_.rank() % ranks;
        const int64_t sharers =
            config_.training.global_batch_size / (config_.training.micro_batch_size * ranks);
        std::vector<int64_t> rows;
        bool first = true;
        for (const auto& block : trainer_->transformer().blocks()) {
            rows.push_back(0);
            if (block->router() == nullptr) continue;
            std::vector<int64_t> counts(to_size(experts));
            trainer_->ops().device().copy_out(counts.data(), block->router()->step_counts().data,
                                              counts.size() * sizeof(int64_t));
            const auto begin = counts.begin() + own * local;
            rows.back() = std::accumulate(begin, begin + local, int64_t{0}) / sharers;
            if (first) set_load(counts, local);
            first = false;
        }
        trainer_->set_known_rows(std::move(rows));
    }

    void set_load(const std::vector<int64_t>& counts, int64_t local) {
        const double total = f64(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
        if (total <= 0) return;
        const auto experts = static_cast<int64_t>(counts.size());
        int64_t most = 0;
        for (int64_t first = 0; first < experts; first += local)
            most = std::max(
                most, std::accumulate(counts.begin() + first, counts.begin() + first + local, int64_t{0}));
        result_.expert_load = f64(*std::ranges::max_element(counts)) * f64(experts) / total;
        const int64_t holders = experts / local;
        result_.rank_load = f64(most) * f64(holders) / total;
    }

    Config config_;
    ProcessGroup& world_;
    BackendChoice backend_;
    const EnergyCounter& energy_;
    std::unique_ptr<Trainer> trainer_;
    const OnStep& on_step_;
    RowSamples samples_;
    ArmProfile result_;
};

}  // namespace

Config profiled_config(const Config& config, std::optional<int64_t> measured_steps) {
    Config result = config;
    if (measured_steps) result.profile.profile_step_end = config.profile.profile_step_start + *measured_steps;
    result.training.eval_iters = 0;
    result.training.on_divergence = OnDivergence::stop;
    result.training.grad_norm_limit = result.training.loss_spike_factor = 0.0;
    result.output.record_routing.clear();
    const ProfileRouting routing = config.profile.routing;
    if (routing == ProfileRouting::data) return result;
    result.data.routing_path.clear();
    result.moe.moe_router_force_load_balancing = routing == ProfileRouting::balanced;
    result.moe.moe_router_force_biased = routing == ProfileRouting::skewed_1_25  ? 1.25
                                         : routing == ProfileRouting::skewed_2_0 ? 2.0
                                                                                 : 0.0;
    return result;
}

int64_t profiled_steps(const ProfileSpec& spec) {
    constexpr int64_t kPasses = 3;
    return spec.profile_step_start + kPasses * (spec.profile_step_end - spec.profile_step_start);
}

ArmProfile profile_arm(const Arm& arm, ProcessGroup& world, const BackendChoice& backend,
                       const std::shared_ptr<const TokenSource>& data, MachineCeilings& ceilings,
                       const EnergyCounter& energy, const OnStep& on_step) {
    ArmRun run(arm, world, backend, data, energy, on_step);
    run.warm_up();
    run.time_stages();
    run.time_layer();
    run.time_steps();
    run.measure_energy();
    return run.finish(ceilings);
}

}  // namespace fp8flow::profile
