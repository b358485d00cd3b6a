// SPDX-License-Identifier: MIT
// TrainedModel: a model that is used without training it further, by evaluate and generate: its
// configuration, serial and with micro-batches as batches, then its weights.
#pragma once

#include "model/commands/commands.h"
#include "model/report/log.h"
#include "model/train/trainer.h"

#include <memory>
#include <string>

namespace fp8flow {

class TrainedModel {
public:
    // Reads the configuration. On other ranks than the run was trained on, a batch is a micro-batch of each.
    TrainedModel(const Options& options, ProcessGroup& world);

    // Makes the model and reads its weights: those of --weights, of the newest checkpoint of a run, or what
    // the configuration names. Collective.
    void load(std::shared_ptr<const data::TokenSource> data, report::RunLog& log);

    Config& config() { return config_; }            // before load: may be changed
    const Config& asked() const { return asked_; }  // as the files and --set have it
    const BackendChoice& backend() const { return backend_; }
    Trainer& trainer() { return *trainer_; }
    const std::string& weights() const { return weights_; }  // where they came from

private:
    const Options& options_;
    ProcessGroup& world_;
    Config asked_, config_;
    BackendChoice backend_;
    std::unique_ptr<Trainer> trainer_;
    std::string weights_ = "as initialised";
};

}  // namespace fp8flow
