// SPDX-License-Identifier: MIT
// From counts to seconds.
#include "model/predict/time.h"

#include "kernels/core/error.h"
#include "layers/transformer_block.h"
#include "model/plan/plan.h"
#include "model/predict/stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string_view>

namespace fp8flow::predict {

namespace {

// An assumption about exchanges between hosts, which are not measured.
constexpr double kHostStop = 50e-6;  // the host reads counts from the device, twice per exchange by NCCL

constexpr std::string_view kReduction = "gradient reduction/gradient reduction/update";

class Predictor {
public:
    Predictor(const Config& config, int64_t gpus, const Gpu& gpu) : config_(config), gpus_(gpus), gpu_(gpu) {
        const TrainingSpec& training = config.training;
        micro_batches_ = f64(training.global_batch_size) / f64(training.micro_batch_size * gpus);
        accumulates_ = (micro_batches_ - 1) / micro_batches_;
    }

    StepTime run() {
        StepTime time;
        add_layers(time);
        use(config_.precision.recipe);
        add(time, ends_work(config_, accumulates_), micro_batches_);
        add(time, update_work(config_, gpus_), 1);
        for (const StageTime& stage : time.stages) {
            time.step += stage.seconds * stage.runs;
            time.launches += stage.work.launches * stage.runs;
            const bool rows = stage.work.wire == Wire::dispatch || stage.work.wire == Wire::combine;
            if (rows) time.wire += stage.wire * stage.runs;
        }
        const double hidden = std::min(hidden_seconds(time), time.wire);
        time.exposed = time.wire - hidden;
        time.step -= hidden;
        // a graph is launched as a whole
        if (config_.schedule.cuda_graph_impl == CudaGraphImpl::none) {
            const double host = gpu_.calibration.host_seconds;
            time.host_bound = time.step < time.launches * host;
            time.step = std::max(time.step, time.launches * host);
            time.layer = std::max(time.layer, layer_launches_ * host);
        }
        time.clock = clock_;
        time.tokens = f64(config_.training.global_batch_size * config_.model.seq_length);
        time.useful_flops =
            sum_of(plan::count_flops(config_), &plan::FlopPart::both) * time.tokens / f64(gpus_);
        return time;
    }

private:
    void use(Recipe recipe) {
        shares_ = &gpu_.calibration.recipes.at(std::string(recipe_name(recipe)));
        clock_ = gpu_.sheet.clock > 0 ? gpu_.sheet.clock : shares_->clock;
    }

    void add_layers(StepTime& time) {
        struct Layers {
            double moe = 0, dense = 0;
        };
        std::map<Recipe, Layers> layers;
        const ModelSpec& m = config_.model;
        double moe_layers = 0;
        for (int64_t layer = 0; layer < m.num_layers; ++layer) {
            Layers& own = layers[plan::layer_precision(config_, layer).recipe];
            const bool moe = plan::is_moe(config_, layer);
            (moe ? own.moe : own.dense) += 1;
            moe_layers += moe ? 1 : 0;
        }
        for (const auto& [recipe, count] : layers) {
            use(recipe);
            PrecisionSpec precision = config_.precision;
            if (recipe != precision.recipe) precision = with_recipe(config_, recipe).precision;
            const LayerWork work = layer_work(config_, precision, accumulates_);
            const size_t first = time.stages.size();
            if (count.moe > 0) add(time, work.moe, count.moe * micro_batches_);
            const std::span stages = std::span(time.stages).subspan(first);
            wait_for_late_ranks(stages);
            for (const StageTime& stage : stages) {
                time.layer += stage.seconds * count.moe / moe_layers;
                layer_launches_ += stage.work.launches * count.moe / moe_layers;
            }
            if (count.dense > 0) add(time, work.dense, count.dense * micro_batches_);
            add(time, work.attention, (count.moe + count.dense) * micro_batches_);
        }
    }

    // A combine waits for late ranks: at their power limits the GPUs of one host differ in speed.
    void wait_for_late_ranks(std::span<StageTime> stages) const {
        std::map<std::string, double> worked;
        for (const StageTime& stage : stages)
            if (stage.work.of_experts()) worked[stage.work.direction] += stage.seconds;
        for (StageTime& stage : stages)
            if (stage.work.wire == Wire::combine && stage.wire > 0)
                stage.seconds += gpu_.calibration.late_share * worked[stage.work.direction];
    }

    void add(StepTime& time, const std::vector<Work>& work, double runs) {
        for (const Work& one : work) {
            StageTime stage{.work = one, .wire = wire_seconds(one), .runs = runs};
            stage.seconds = seconds_of(one, stage.wire);
            const bool layer = one.part == "moe layer" || one.part == "dense layer";
            if (layer) stage.seconds *= shares_->whole_over_stages;
            time.stages.push_back(stage);
        }
    }

    double seconds_of(Work work, double wire) const {
        // the main stream uses the SMs that the shared expert leaves idle
        if (work.part == "moe layer" && work.stage == "shared expert" &&
            config_.schedule.moe_shared_expert_overlap)
            work.fp8_idle = work.bf16_idle = 0;
        double local = roofline_seconds(work, gpu_.sheet, clock_);
        if (local > 0) local /= share_of(work);
        const double launches = work.launches * gpu_.calibration.launch_seconds;
        // the share of core attention is of a whole call, launches and all
        if (is_core_attention(work)) return std::max(launches, local);
        switch (work.wire) {
            case Wire::none: return launches + local;
            case Wire::dispatch:
            case Wire::combine: return std::max(launches, latency(wire)) + std::max(local, wire);
            // the pass over device memory is part of the wire's share
            default: return wire > 0 ? launches + wire : 0;
        }
    }

    double latency(double wire) const {
        if (wire <= 0) return 0;
        return gpu_.calibration.exchange_seconds +
               (spans_hosts() && !one_row_per_host(config_) ? 2 * kHostStop : 0);
    }

    bool is_core_attention(const Work& work) const {
        return work.stage == "core attention" && !gpu_.calibration.core_attention.empty();
    }

    double share_of(const Work& work) const {
        if (is_core_attention(work)) {
            const auto& all = gpu_.calibration.core_attention;
            const auto distance = [&](const CoreAttention& one) {
                return std::abs(std::log(f64(one.kv_channels) / f64(config_.model.qk_dim())));
            };
            const auto nearest = std::ranges::min_element(
                all, [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
            return work.direction == "forward" ? nearest->forward : nearest->backward;
        }
        // GEMMs of attention have the shares of the shared expert, which also runs over a rank's own rows:
        // those of bf16, or with FP8 projections those of the recipe.
        const bool product = work.stage == "qkv" || work.stage == "proj" || work.stage == "core attention";
        const auto bf16 = gpu_.calibration.recipes.find("bf16");
        const RecipeShares& shares = product && work.fp8_flops == 0 && bf16 != gpu_.calibration.recipes.end()
                                         ? bf16->second
                                         : *shares_;
        // a recomputed stage has the share of its forward pass; without a shared expert fc1's share counts
        for (const char* stage : {product ? "shared expert" : work.stage.c_str(), "fc1"})
            for (const char* part : {work.part.c_str(), "moe layer"})
                for (const char* direction : {work.direction.c_str(), "forward", "backward", "update"})
                    if (const auto found =
                            shares.shares.find(fmt::format("{}/{}/{}", part, stage, direction));
                        found != shares.shares.end())
                        return found->second;
        fail(ExitCode::usage, "the calibration of {} has no share of {}", gpu_.calibration.gpu, key_of(work));
    }

    int64_t ep() const { return config_.parallel.expert_model_parallel_size; }
    int64_t per_host() const { return gpu_.sheet.gpus_per_host; }
    bool spans_hosts() const { return ep() > per_host(); }

    // Rows to ranks of the host and of other hosts go at the same time.
    double wire_seconds(const Work& work) const {
        if (work.wire == Wire::none || work.wire_bytes <= 0) return 0;
        if (work.wire == Wire::dispatch || work.wire == Wire::combine) {
            if (!spans_hosts()) return work.wire_bytes / gpu_.sheet.peer_rate;
            const double others = f64(ep() - 1), near = f64(per_host() - 1);
            const double crossing = work.wire_bytes * (others - near) / others;
            if (!one_row_per_host(config_))
                return std::max(crossing / gpu_.sheet.network_rate,
                                (work.wire_bytes - crossing) / gpu_.sheet.peer_rate);
            const double ranks = f64(ep()), hosts = ranks / f64(per_host());
            const double rows = plan::expected_distinct_ranks(config_.moe, ep()) * (ranks - 1) / ranks;
            const double once =
                plan::expected_distinct_ranks(config_.moe, ep() / per_host()) * (hosts - 1) / hosts;
            // all rows but those of the token's own GPU take NVLink in the end
            return std::max(work.wire_bytes * once / rows / gpu_.sheet.network_rate,
                            work.wire_bytes / gpu_.sheet.peer_rate);
        }
        return reduction_seconds(work);
    }

    // Shards to their owners and sums back. Replicas of experts are ep ranks apart.
    double reduction_seconds(const Work& work) const {
        const bool dense = work.wire == Wire::dense_reduction;
        const int64_t ranks = dense ? gpus_ : gpus_ / ep();
        const int64_t apart = dense ? 1 : ep();
        const int64_t near = std::clamp<int64_t>(per_host() / apart, 1, ranks);
        // A gather without a share has a reduction's. A profile of one GPU has neither: the rate of copies.
        double share = 1;
        for (const std::string& key : {key_of(work), std::string(kReduction)})
            if (const auto found = shares_->shares.find(key); found != shares_->shares.end()) {
                share = found->second;
                break;
            }
        if (near == ranks) return work.wire_bytes / (gpu_.sheet.peer_rate * share);
        const double crossing = work.wire_bytes * f64(ranks - near) / f64(ranks - 1);
        return std::max(crossing / gpu_.sheet.network_rate,
                        (work.wire_bytes - crossing) / (gpu_.sheet.peer_rate * share));
    }

    // Inside a host nothing is hidden: in the profiles no schedule gains at the power limit. Between hosts
    // the device waits for the network: interleaved micro-batches hide the time in which the other one
    // computes, the shared expert hides its own time. This is not measured.
    double hidden_seconds(const StepTime& time) const {
        if (!spans_hosts()) return 0;
        const bool interleaved = config_.schedule.overlap_moe_expert_parallel_comm && micro_batches_ > 1;
        if (!interleaved && !config_.schedule.moe_shared_expert_overlap) return 0;
        double computed = 0;
        for (const StageTime& stage : time.stages)
            if (interleaved ? stage.work.direction != "update" : stage.work.stage == "shared expert")
                computed += (stage.seconds - stage.wire) * stage.runs;
        return interleaved ? computed * (micro_batches_ - 1) / micro_batches_ : computed;
    }

    const Config& config_;
    int64_t gpus_;
    const Gpu& gpu_;
    double micro_batches_ = 1, accumulates_ = 0, clock_ = 0;
    double layer_launches_ = 0;  // of a MoE layer and micro-batch
    const RecipeShares* shares_ = nullptr;
};

}  // namespace

std::string key_of(const Work& work) {
    return fmt::format("{}/{}/{}", work.part, work.stage, work.direction);
}

// FLOPs and bytes of one kernel overlap, but not wholly: the root of the sum of squares lies between their
// maximum and their sum.
double roofline_seconds(const Work& work, const Datasheet& sheet, double clock) {
    const double compute = (work.bf16_flops + work.bf16_idle) / (sheet.bf16_per_clock * clock) +
                           (work.fp8_flops + work.fp8_idle) / (sheet.fp8_per_clock * clock);
    return std::hypot(compute, work.bytes / sheet.memory_rate);
}

bool can_predict(const Config& config, const Gpu& gpu) {
    for (int64_t layer = 0; layer < config.model.num_layers; ++layer) {
        const PrecisionSpec precision = plan::layer_precision(config, layer);
        if (!knows(precision) ||
            !gpu.calibration.recipes.contains(std::string(recipe_name(precision.recipe))))
            return false;
    }
    return gpu.calibration.recipes.contains(std::string(recipe_name(config.precision)));
}

std::string not_covered(const Config& config) {
    if (config.schedule.overlap_param_gather)
        return "what a gather takes from the layer that runs meanwhile (overlap_param_gather)";
    return "";
}

StepTime predict_step(const Config& config, int64_t gpus, const Gpu& gpu) {
    require(can_predict(config, gpu), ExitCode::usage,
            "no prediction of recipe {}: formulas and shares are known of bf16, fp8_blockwise and fp8_flow, "
            "all of their optimisations on",
            recipe_name(config.precision));
    return Predictor(config, gpus, gpu).run();
}

}  // namespace fp8flow::predict
