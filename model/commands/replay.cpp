// SPDX-License-Identifier: MIT
// `fp8flow replay`: one MoE layer forward and backward on tensors from a file, for comparison with other
// implementations.
#include "kernels/core/scalar_math.h"
#include "model/base/provenance.h"
#include "model/commands/commands.h"
#include "model/config/hf_config.h"
#include "model/data/routing_file.h"
#include "model/replay/layer.h"
#include "model/report/run_report.h"
#include "model/safetensors/writer.h"
#include "model/weights/export.h"

#include <algorithm>
#include <cmath>

namespace fp8flow {

using namespace weights;
using namespace report;
using namespace replay;

namespace {

constexpr const char* kHidden = "hidden_states";
constexpr const char* kGradient = "grad_output";

// Only the MoE layer of the configuration: routing by the weights, a capacity for every row, no training
// step.
Config replay_config(const Options& options, int world_size) {
    std::vector<std::string> overrides = options.overrides;
    overrides.insert(overrides.end(), {"training.micro_batch_size=1",
                                       fmt::format("training.global_batch_size={}", world_size)});
    Config config =
        options.config_path.empty()
            ? parse_config("output: {log_interval: 1}", "configuration", overrides, world_size,
                           options.hf_config.empty() ? ImportedModel{} : read_hf_config(options.hf_config))
            : load_config(options.config_path, overrides, world_size, options.hf_config);
    const bool has_moe = std::ranges::count(config.model.moe_layer_freq, 1) > 0;
    require(has_moe, ExitCode::usage, "model.moe_layer_freq: has no MoE layer, want one for replay");
    config.model.num_layers = 1;
    config.model.moe_layer_freq = {1};
    config.model.attention = false;
    config.model.num_layers_at_start_in_bf16 = config.model.num_layers_at_end_in_bf16 = 0;
    config.moe_layer_freq = "1";
    config.recompute = {};
    config.moe.moe_router_load_balancing_type.clear();
    config.moe.moe_aux_loss_coeff.clear();
    config.moe.moe_z_loss_coeff = 0;
    config.moe.moe_router_force_load_balancing = false;
    config.moe.moe_router_force_biased = 0;
    config.moe.moe_expert_rank_capacity_factor = 0;
    return config;
}

class ReplayRun {
public:
    ReplayRun(const Options& options, ProcessGroup& world)
        : options_(options),
          replay_(options.replay),
          world_(world),
          config_(replay_config(options, world.size())),
          backend_(choose_backend(options.backend, options.placement, world)),
          input_(existing("--input", replay_.input, ExitCode::data)),
          run_folder_(run_folder_of(options, config_.output.out), world),
          folder_(run_folder_.name()),
          log_(world.rank(), options.detail) {
        config_.output.out = run_folder_.name();
        if (!run_folder_.note().empty()) log_.line(run_folder_.note());
        share_tokens();
        if (!replay_.routing.empty()) give_routing();
        layer_.emplace(config_, world, backend_, replay_.norm ? ReplayNorm::apply : ReplayNorm::skip,
                       replay_.intermediates ? ReplayRecord::intermediates : ReplayRecord::results, own_,
                       slots_);
    }

    int run() {
        log_.line(backend_.note);
        warn_of_unread(config_, {"checkpoint.load", "checkpoint.pretrained_checkpoint"}, log_);
        log_.line("replay: {} tokens, recipe {}, {}; tokens {} on each", tokens_,
                  recipe_name(config_.precision), counted(world_.size(), "rank"), slots_);
        load();
        run_folder_.keep();
        if (world_.rank() == 0) log_.open(folder_, "replay.log");
        const std::vector<Bf16> hidden = rows_of(kHidden);
        layer_->forward(hidden);
        add("output", layer_->output());
        add("router_logits", layer_->router_logits());
        add("topk_ids", layer_->topk_ids());
        add("topk_weights", layer_->topk_weights());
        const bool backward = input_.contains(kGradient);
        if (backward) {
            layer_->backward(rows_of(kGradient));
            add("grad_hidden_states", layer_->grad_hidden());
        }
        run_folder_.check();
        if (world_.rank() == 0) write("replay.safetensors", results_);
        if (replay_.intermediates)
            write(fmt::format("intermediates.rank{}.safetensors", world_.rank()), layer_->intermediates());
        if (backward) write_gradients();
        if (world_.rank() == 0) write_summary(backward);
        world_.barrier();
        log_.line("written: {}/replay.safetensors, replay.json{}{}", folder_.path(),
                  backward ? ", gradients/" : "; no grad_output in the input, so no backward",
                  replay_.intermediates ? ", intermediates.rankN.safetensors" : "");
        return 0;
    }

private:
    const TensorEntry& checked(const char* name) const {
        const TensorSet::Item item = input_.find(name);
        require(static_cast<bool>(item), ExitCode::data, "{}: has no tensor \"{}\" [tokens, hidden_size]",
                replay_.input, name);
        const TensorEntry& entry = *item.entry;
        const int64_t hidden = config_.model.hidden_size;
        require(entry.shape.size() == 2 && entry.shape[1] == hidden && entry.shape[0] > 0, ExitCode::data,
                "{}: \"{}\" is {}, want [tokens, hidden_size = {}] with at least one token", replay_.input,
                name, describe(entry), hidden);
        return entry;
    }

    // Contiguous shares; the last ranks may have fewer tokens, or none.
    void share_tokens() {
        tokens_ = checked(kHidden).shape[0];
        if (input_.contains(kGradient))
            require(checked(kGradient).shape[0] == tokens_, ExitCode::data,
                    "{}: \"{}\" has {} tokens, \"{}\" {}", replay_.input, kGradient,
                    checked(kGradient).shape[0], kHidden, tokens_);
        slots_ = ceil_div(tokens_, world_.size());
        first_ = std::min(tokens_, slots_ * world_.rank());
        own_ = std::min(slots_, tokens_ - first_);
        config_.model.seq_length = slots_;
    }

    // The ids of this rank's tokens.
    void give_routing() {
        const int64_t topk = config_.moe.moe_router_topk;
        const data::GivenRouting given(replay_.routing, {.layers = {replay_.layer},
                                                         .tokens = tokens_,
                                                         .topk = topk,
                                                         .num_experts = config_.moe.num_experts});
        std::vector<int32_t> ids(to_size(own_ * topk));
        given.read(0, first_, ids);
        ids.resize(to_size(slots_ * topk));
        config_.moe.given_ids = [ids](const MoeSpec&, int, int64_t, int64_t) { return ids; };
    }

    const std::string& weights_path() const {
        return options_.weights.empty() ? replay_.input : options_.weights;
    }

    // Rounded to BF16, the type of the residual stream.
    std::vector<Bf16> rows_of(const char* name) {
        const TensorSet::Item item = input_.find(name);
        const int64_t hidden = config_.model.hidden_size;
        std::vector<float> values(to_size(own_ * hidden));
        read_floats(*item.entry, item.bytes(), first_ * hidden, values);
        std::vector<Bf16> rounded(values.size());
        int64_t changed[2] = {0, 0};
        for (size_t i = 0; i < values.size(); ++i) {
            rounded[i] = to_bf16(values[i]);
            changed[0] += to_float(rounded[i]) != values[i];
            changed[1] += !std::isfinite(values[i]);
        }
        world_.all_reduce_sum(std::span<int64_t>(changed));
        require(changed[1] == 0, ExitCode::data, "{}: \"{}\": {} of its values are NaN or infinite",
                replay_.input, name, changed[1]);
        if (changed[0] > 0)
            log_.line("warning: {}: {} of {} values are no BF16 numbers and were rounded", name, changed[0],
                      tokens_ * hidden);
        return rounded;
    }

    void load() {
        if (!layer_->exchange_note().empty()) log_.line(layer_->exchange_note());
        const TensorSet weights(existing("--weights", weights_path(), ExitCode::data));
        names_ = find_names(weights, replay_.layer, config_.family);
        names_.folds.mlp_output = config_.folds.mlp_output;
        const LoadedWeights loaded =
            load_weights(weights, names_, layer_->targets(), {config_.model, config_.moe}, names_.scopes(),
                         layer_->parameters(), layer_->device(), {kHidden, kGradient});
        log_.line("weights: {} ({} tensors, {} of them FP8)", weights_path(), loaded.tensors,
                  loaded.dequantised);
    }

    // Every rank's rows in the order of the tokens.
    void add(const std::string& name, HostValues mine) {
        const int64_t width = mine.shape.back();
        const auto elements = to_size(slots_ * width), all = elements * to_size(world_.size());
        const auto gather = [&](auto& values) {
            auto gathered = values;
            values.resize(elements);
            gathered.resize(all);
            world_.all_gather(values.data(), elements * sizeof(values[0]), gathered.data());
            gathered.resize(to_size(tokens_ * width));
            return gathered;
        };
        HostValues whole{.shape = {tokens_, width}};
        if (name == "topk_ids")
            whole.integers = gather(mine.integers);
        else
            whole.floats = gather(mine.floats);
        results_[name] = std::move(whole);
    }

    void write(const std::string& file_name, const std::map<std::string, HostValues>& tensors) const {
        std::vector<TensorDeclaration> declarations;
        declarations.reserve(tensors.size());
        for (const auto& [name, values] : tensors)
            declarations.push_back(
                {name, values.integers.empty() ? FileDType::f32 : FileDType::i32, values.shape});
        AtomicFile file = folder_.create_atomic(file_name);
        SafetensorsWriter writer(declarations, {{"recipe", std::string(recipe_name(config_.precision))}},
                                 [&](const void* data, size_t bytes) { file.write(data, bytes); });
        for (const auto& [name, values] : tensors) {
            if (values.integers.empty())
                writer.append(name, values.floats.data(), std::ssize(values.floats) * 4);
            else
                writer.append(name, values.integers.data(), std::ssize(values.integers) * 4);
        }
        writer.finish();
        file.commit();
    }

    // What the tensors came from.
    void write_summary(bool backward) const {
        nlohmann::json summary = {{"input", replay_.input},
                                  {"weights", weights_path()},
                                  {"layer", replay_.layer},
                                  {"routing", replay_.routing},
                                  {"norm", replay_.norm},
                                  {"backward", backward},
                                  {"recipe", std::string(recipe_name(config_.precision))},
                                  {"tokens", tokens_},
                                  {"ranks", world_.size()},
                                  {"config", dump_config(config_)}};
        add_provenance(summary, make_provenance(options_.command, backend_, world_.size()));
        folder_.write_json("replay.json", summary);
    }

    // Under the names of the weights, from the ranks that hold everything together.
    void write_gradients() {
        if (world_.rank() >= config_.parallel.expert_model_parallel_size) return;
        ExportChoice choice{.names = names_, .format = ExportFormat::f32};
        if (world_.size() > 1 && names_.joins_experts())
            choice.names.storage.experts = ExpertNames::projections;
        export_weights(folder_.subfolder("gradients"), layer_->gradients(), {config_.model, config_.moe},
                       choice, layer_->expert_parallel_group(), layer_->device());
    }

    const Options& options_;
    const ReplayOptions& replay_;
    ProcessGroup& world_;
    Config config_;
    BackendChoice backend_;
    TensorSet input_;
    RunFolder run_folder_;
    OutputFolder folder_;  // the same, of each rank
    RunLog log_;
    int64_t tokens_ = 0, slots_ = 0, first_ = 0, own_ = 0;
    std::optional<ReplayLayer> layer_;
    HfNames names_;
    std::map<std::string, HostValues> results_;
};

}  // namespace

int run_replay(const Options& options, ProcessGroup& world) { return ReplayRun(options, world).run(); }

}  // namespace fp8flow
