// SPDX-License-Identifier: MIT
// Which weights, and a trainer that takes no step.
#include "model/commands/trained_model.h"

#include "model/checkpoint/resume.h"
#include "model/config/fields.h"
#include "model/config/hf_config.h"
#include "model/predict/require_fit.h"
#include "model/weights/load.h"

namespace fp8flow {

namespace {

Config read(const Options& options) {
    Config config = load_config(options.config_path, options.overrides, std::nullopt, options.hf_config);
    CheckpointSpec& from = config.checkpoint;
    const bool has_load = is_asked(config, "checkpoint.load");
    std::string weights = options.weights;
    if (weights.empty() && is_asked(config, "checkpoint.pretrained_checkpoint"))
        weights = from.pretrained_checkpoint;
    require(weights.empty() || from.load.empty() || !has_load, ExitCode::usage,
            "checkpoint.load = {} and --weights (checkpoint.pretrained_checkpoint) {} both name the weights: "
            "give one of the two",
            from.load, weights);
    if (!weights.empty()) {
        from.pretrained_checkpoint = weights;  // load() warns if a file has checkpoint.load
    } else {
        if ((!options.run.empty() && !has_load) || from.load == "auto") {
            const std::string run = options.run.empty() ? config.output.out : options.run;
            from.load = from.save.empty() ? run : from.save;
        }
        if (!from.load.empty()) from.pretrained_checkpoint.clear();
    }
    from.finetune = weights.empty() && !from.load.empty();  // the weights alone, whatever the data are
    config.precision.moe_wgrad_micro_batches = 1;
    return config;
}

}  // namespace

bool is_asked(const Config& config, const char* key) {
    const auto origin = config.origin.find(key);
    return origin != config.origin.end() && origin->second == "--set";
}

void warn_of_unread(const Config& config, std::initializer_list<const char*> keys, report::RunLog& log) {
    for (const char* key : keys)
        if (const ConfigField& field = field_named(key);
            is_asked(config, key) && field.get(config) != field.get(Config{}))
            log.line("warning: {} = {} has no effect: this command does not read it", key, field.get(config));
}

TrainedModel::TrainedModel(const Options& options, ProcessGroup& world)
    : options_(options),
      world_(world),
      asked_(read(options)),
      config_(asked_),
      backend_(choose_backend(options.backend, options.placement, world)) {
    require_own_layers(config_);
    config_.schedule = {};
    config_.data.routing_path.clear();
    config_.output.record_routing.clear();
    config_.training.global_batch_size = config_.training.micro_batch_size * world.size();
    check_config(config_, world.size());
}

void TrainedModel::load(std::shared_ptr<const data::TokenSource> data, report::RunLog& log) {
    warn_of_unread(asked_, {"data.routing_path", "output.record_routing"}, log);
    predict::require_fit(log, {config_}, backend_, world_, options_.placement.ranks_on_host,
                         options_.where_short);
    trainer_ = std::make_unique<Trainer>(config_, world_, backend_, Arithmetic::stated, data);
    if (const std::string& path = asked_.checkpoint.pretrained_checkpoint; !path.empty()) {
        for (const std::string& line :
             weights::load_model(path, config_, trainer_->transformer(), trainer_->ops().device()))
            log.line(line);
        if (const std::string& load = asked_.checkpoint.load; !load.empty())
            log.line("warning: checkpoint.load = {} ({}) is not read: the weights are those of {}", load,
                     asked_.origin.at("checkpoint.load"), path);
        trainer_->weights_replaced();
        weights_ = path;
    } else if (const auto resumed = checkpoint::resume(*trainer_, asked_, *data, world_, {})) {
        for (const std::string& line : messages_of(*resumed))
            if (line.starts_with("warning")) log.line(line);
        weights_ = resumed->path;
    } else {
        log.line("warning: the weights are as initialised: name others with --weights, or a run's folder");
    }
}

}  // namespace fp8flow
