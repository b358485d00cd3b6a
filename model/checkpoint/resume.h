// SPDX-License-Identifier: MIT
// From a checkpoint back to a run: which checkpoint, whether it fits, and the state onto the device. Read
// next: reader.h, state.h.
#pragma once

#include "model/checkpoint/folder.h"
#include "model/train/trainer.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow::checkpoint {

struct Resumed {
    int64_t step = 0;  // steps that are done
    std::string path;
    uint64_t run = 0;                  // CheckpointManifest::run
    std::vector<std::string> refused;  // newer checkpoints, each with the reason
    std::vector<std::string> changed;  // keys with other values now: "section.key: then | now"
    Config config;                     // of the run from here on
    std::vector<std::string> kept;     // rules of the run that saved which it goes on with (keep_old_rules)
    std::string more_data;             // a sentence on the position, where data_path has grown
    int64_t held_out_before = 0;       // files of such data that are held out now, and were trained on
    bool by_size = false;  // saved by an older version: the content of token files could not be compared
};

// For the log: a line for each newer checkpoint, changed key and kept rule, with its level.
std::vector<std::string> messages_of(const Resumed& resumed);

using Accept = std::function<bool(const CheckpointManifest&)>;

// checkpoint.load of `config` on every rank: `auto` takes the newest checkpoint of `save_folder` that passes
// its checks, and nothing where there is none yet; a folder of checkpoints, or the run's folder above it,
// gives its newest one, a checkpoint itself. Everything is verified on all ranks before the first byte of the
// model changes. Throws Error(checkpoint), the same on every rank, for a damaged checkpoint (if it was named,
// or if no older one is complete), one that cannot be read, one of another model, or one of a run on other
// data. `accept`: which ones `auto` may take; none: all.
std::optional<Resumed> resume(Trainer& trainer, const Config& config, const data::TokenSource& data,
                              ProcessGroup& world, const std::string& save_folder,
                              std::shared_ptr<Disk> disk = std::make_shared<Disk>(),
                              const Accept& accept = {});

}  // namespace fp8flow::checkpoint
