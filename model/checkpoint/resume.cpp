// SPDX-License-Identifier: MIT
// Choice, verification, fit, and the copy to the device.
#include "model/checkpoint/resume.h"

#include "kernels/core/scalar_math.h"
#include "model/checkpoint/agree.h"
#include "model/checkpoint/reader.h"
#include "model/checkpoint/state.h"
#include "model/config/changed_rules.h"
#include "model/config/fields.h"
#include "model/data/blend.h"
#include "model/job/watchdog.h"
#include "model/safetensors/tensor_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace fp8flow::checkpoint {

namespace {

// Rank 0 lists the folder; the others take its answer.
std::vector<int64_t> steps_of(const CheckpointFolder& folder, ProcessGroup& world) {
    std::vector<int64_t> steps;
    on_all_ranks(world, [&] {
        if (world.rank() == 0) steps = folder.steps();
    });
    auto count = static_cast<int64_t>(steps.size());
    world.broadcast(&count, sizeof count, 0);
    steps.resize(to_size(count));
    world.broadcast(steps.data(), steps.size() * sizeof(int64_t), 0);
    return steps;
}

// The files are divided over the ranks, so that each byte is read once. Throws Unreadable on all ranks where
// one of them does.
std::unique_ptr<CheckpointReader> open_verified(const CheckpointFolder& folder, int64_t step,
                                                ProcessGroup& world) {
    std::unique_ptr<CheckpointReader> reader;
    on_all_ranks(world, [&] {
        reader = std::make_unique<CheckpointReader>(folder, step);
        const auto files = static_cast<int64_t>(reader->manifest().files.size());
        for (int64_t file = world.rank(); file < files; file += world.size()) reader->verify_file(file);
    });
    return reader;
}

std::string text_of(FileDType dtype, const std::vector<int64_t>& shape) {
    return fmt::format("{}[{}]", name_of(dtype), fmt::join(shape, ", "));
}

// Frozen parameters may have no moments. Moments in the file are not read then; missing ones are 0.
struct Frozen {
    bool then = false, now = false;

    bool may_be_missing(const std::string& name) const { return then && is_moment(name); }
    bool may_be_unread(const std::string& name) const { return now && is_moment(name); }
};

// A line for each tensor that is missing, too many, or of another shape.
void check_tensors(const CheckpointReader& reader, const std::vector<StateTensor>& state, bool weights_alone,
                   const Frozen& frozen) {
    std::vector<std::string> problems;
    std::map<std::string, const StateTensor*> wanted;
    for (const StateTensor& tensor : state) {
        const bool is_first = wanted.emplace(tensor.name, &tensor).second;
        if (is_first && !reader.wholes().contains(tensor.name) && !frozen.may_be_missing(tensor.name))
            problems.push_back(fmt::format("{}: tensor {} is not there, this model has it as {}",
                                           reader.path(), tensor.name,
                                           text_of(file_dtype(tensor.dtype), tensor.shape)));
    }
    for (const auto& [name, place] : reader.wholes()) {
        if (weights_alone && !is_weight(name)) continue;
        const auto found = wanted.find(name);
        if (found == wanted.end() && frozen.may_be_unread(name)) continue;
        if (found == wanted.end())
            problems.push_back(fmt::format("{}: tensor {}: this model has none of that name",
                                           reader.path_of_file(place.file), name));
        else if (!found->second->may_be_read_from(place.dtype) || place.shape != found->second->shape)
            problems.push_back(fmt::format("{}: tensor {} is {}, this model has it as {}",
                                           reader.path_of_file(place.file), name,
                                           text_of(place.dtype, place.shape),
                                           text_of(file_dtype(found->second->dtype), found->second->shape)));
    }
    throw_problems(problems, ExitCode::checkpoint);
}

// Saved by a version that compared token files by name and size, and did not compare model.seq_length.
bool is_old(const CheckpointManifest& saved) { return saved.seq_length == 0; }

// Absent where this version cannot read it.
std::optional<Config> saved_config(const CheckpointManifest& saved) {
    try {
        return parse_config(without_old_keys(saved.config), "checkpoint");
    } catch (const Error&) {
        return std::nullopt;
    }
}

constexpr const char* kOtherVersion = "the configuration in the checkpoint is not one of this version";

// Keys that say where and how a run computes, not what.
bool says_what_is_trained(const std::string& line) {
    for (const char* begin : {"training.use_distributed_optimizer:", "model.hf_family:", "output.",
                              "checkpoint.", "validate.", "profile.", "kernels.", "parallel."})
        if (line.starts_with(begin)) return false;
    return true;
}
bool says_what_is_read(const std::string& line) { return line.starts_with("data."); }

// Keys that differ between the saved run and this one: lines for which `counts` is true.
std::vector<std::string> changed_keys(const std::optional<Config>& saved, const Config& config,
                                      bool (*counts)(const std::string&)) {
    if (!saved) return {kOtherVersion};
    std::vector<std::string> lines = diff_configs(*saved, config);
    std::erase_if(lines, [&](const std::string& line) { return !counts(line); });
    return lines;
}

// Compares with what was saved, and goes on with its rules unless its weights alone are taken.
void compare_configs(const CheckpointReader& reader, bool weights_alone, Resumed& resumed) {
    std::optional<Config> saved = saved_config(reader.manifest());
    Config before = saved.value_or(Config{}), kept = resumed.config;
    const std::vector<std::string> rules = keep_old_rules(before, kept);
    if (saved) saved = before;
    if (!weights_alone) {
        resumed.config = kept;
        resumed.kept = rules;
    }
    resumed.changed = changed_keys(saved, resumed.config, says_what_is_trained);
}

// The data of the saved run, if data_path names all of it, unchanged, and more, and no other key of the data
// differs; else null.
std::shared_ptr<const data::TokenSource> data_before(const CheckpointManifest& saved,
                                                     const std::optional<Config>& before,
                                                     const Config& config) {
    if (!before) return nullptr;
    const std::vector<std::string>&then = before->data.data_path, &now = config.data.data_path;
    Config same = config;
    same.data.data_path = then;
    const std::vector<std::string> all = data::paths_of(now), old = data::paths_of(then);
    const bool longer = all.size() > old.size() && std::ranges::all_of(old, [&](const std::string& path) {
                            return std::ranges::find(all, path) != all.end();
                        });
    if (!longer || !changed_keys(before, same, says_what_is_read).empty()) return nullptr;
    const auto source = open_data(same);
    const bool is_same = saved.data_fingerprint ==
                         (is_old(saved) ? source->fingerprint_without_content() : source->fingerprint());
    return is_same ? source : nullptr;
}

// The position in the data is a number of samples. It has a meaning only for the same windows in the same
// order. If there are more data now, their order begins at its start, and the data before are returned.
std::shared_ptr<const data::TokenSource> check_position(const CheckpointReader& reader, const Config& config,
                                                        const data::TokenSource& data) {
    const CheckpointManifest& saved = reader.manifest();
    constexpr const char* kOtherwise =
        "or take its weights alone and begin at step 0: checkpoint.finetune=true";
    const auto require_same = [&](const char* key, auto then, decltype(then) now) {
        require(then == now, ExitCode::checkpoint, "{}: saved with {} {}, this run has {}; set it back, {}",
                reader.path(), key, then, now, kOtherwise);
    };
    require_same("training.seed", saved.seed, config.training.seed);
    require_same("training.global_batch_size", saved.global_batch_size, config.training.global_batch_size);
    const std::optional<Config> before = saved_config(saved);
    if (!is_old(saved) || before)
        require_same("model.seq_length", is_old(saved) ? before->model.seq_length : saved.seq_length,
                     config.model.seq_length);
    const uint64_t now = is_old(saved) ? data.fingerprint_without_content() : data.fingerprint();
    const std::vector<std::string> changed = changed_keys(before, config, says_what_is_read);
    // The fingerprint of a blend does not say in which order its data sets take turns.
    const bool is_same = saved.data_fingerprint == now &&
                         (!before || data::blend_order(before->data.data_path) == data.order());
    const auto less = is_same ? nullptr : data_before(saved, before, config);
    require(less || is_same, ExitCode::checkpoint,
            "{}: saved with other data (fingerprint {}, data.data_path has {} now): {}; name the "
            "same data, or the same and more, {}",
            reader.path(), checksum_text(saved.data_fingerprint), checksum_text(now),
            changed.empty() ? "the keys are the same, so the files have changed"
                            : fmt::format("{}", fmt::join(changed, ", ")),
            kOtherwise);
    require(
        saved.step <= config.training.train_iters, ExitCode::usage,
        "training.train_iters: got {}, want at least {}: as many are done in {}; raise it, or resume from "
        "an older checkpoint",
        config.training.train_iters, saved.step, reader.path());
    return less;
}

template <class From, class To, class Convert>
std::vector<uint8_t> each_as(const std::vector<uint8_t>& bytes, Convert convert) {
    std::vector<uint8_t> result(bytes.size() / sizeof(From) * sizeof(To));
    for (size_t i = 0; i < bytes.size() / sizeof(From); ++i) {
        From value;
        std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
        const To other = convert(value);
        std::memcpy(result.data() + i * sizeof other, &other, sizeof other);
    }
    return result;
}
// Moments in the other type: FP32 rounded to the nearest BF16, or BF16 widened.
std::vector<uint8_t> converted(const std::vector<uint8_t>& bytes, FileDType from) {
    if (from == FileDType::bf16)
        return each_as<Bf16, float>(bytes, [](Bf16 value) { return to_float(value); });
    return each_as<float, Bf16>(bytes, [](float value) { return to_bf16(value); });
}

void copy_to_device(const CheckpointReader& reader, const std::vector<StateTensor>& state, Device& device) {
    std::vector<uint8_t> bytes;
    for (const StateTensor& tensor : state) {
        if (!tensor.view) continue;
        note_progress();
        const auto found = reader.wholes().find(tensor.name);
        if (found == reader.wholes().end()) {
            device.fill(tensor.view.data, 0, to_size(tensor.view.bytes()));
            continue;
        }
        const CheckpointReader::Whole& whole = found->second;
        bytes.resize(to_size(whole.bytes));
        reader.read(whole, bytes);
        if (whole.dtype != file_dtype(tensor.dtype)) bytes = converted(bytes, whole.dtype);
        device.copy_in(tensor.view.data, bytes.data() + tensor.first * size_of(tensor.dtype),
                       to_size(tensor.bytes()));
    }
}

struct Chosen {
    std::unique_ptr<CheckpointReader> reader;
    std::vector<std::string> refused;
    std::vector<int64_t> refused_steps;
};

// The newest that passes. Damaged ones are kept under another name, so that this run can save its own. One
// that cannot be read may be whole, so no older one is taken in its place.
std::optional<Chosen> newest_whole(const CheckpointFolder& folder, ProcessGroup& world,
                                   const Accept& accept) {
    const std::vector<int64_t> steps = steps_of(folder, world);
    Chosen chosen;
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
        try {
            chosen.reader = open_verified(folder, *step, world);
        } catch (const Unreadable&) {
            throw;
        } catch (const Error& error) {
            if (error.code() != ExitCode::checkpoint) throw;
            chosen.refused.push_back(error.what());
            chosen.refused_steps.push_back(*step);
            continue;
        }
        if (!accept || accept(chosen.reader->manifest())) return chosen;
    }
    if (chosen.refused.empty()) return std::nullopt;
    fail(ExitCode::checkpoint, "{}: none of {} checkpoints is whole; the newest: {}", folder.path(),
         chosen.refused.size(), chosen.refused.front());
}

// What checkpoint.load names.
struct Target {
    std::string folder;
    std::optional<int64_t> step;  // a checkpoint itself
};
Target target_of(const std::string& load, const std::string& save_folder) {
    if (load == "auto") return {save_folder, std::nullopt};
    std::filesystem::path path = std::filesystem::absolute(load).lexically_normal();
    if (!path.has_filename()) path = path.parent_path();  // "runs/a/" is "runs/a"
    const auto step = step_of_name(path.filename().string());
    return {step ? path.parent_path().string() : path.string(), step};
}

// A run's folder means the folder of its checkpoints, if it has none itself. The first rank decides.
void enter_run(Target& target, Disk& disk, ProcessGroup& world) {
    int32_t below = 0;
    if (world.rank() == 0 && !target.step) {
        const std::string inner = target.folder + "/" + kCheckpoints;
        const DiskHandle outer(disk, disk.open_folder(target.folder)), folder(disk, disk.open_folder(inner));
        std::vector<std::string> names;
        if (outer.get() >= 0 && folder.get() >= 0 && disk.list(outer.get(), names) >= 0)
            below = std::ranges::none_of(
                names, [](const std::string& name) { return step_of_name(name).has_value(); });
    }
    world.broadcast(&below, sizeof below, 0);
    if (below != 0) target.folder += std::string("/") + kCheckpoints;
}

std::optional<Chosen> choose(const std::string& load, const Target& target, const CheckpointFolder& folder,
                             ProcessGroup& world, const Accept& accept) {
    if (load == "auto") return newest_whole(folder, world, accept);
    if (target.step) return Chosen{open_verified(folder, *target.step, world), {}, {}};
    const std::vector<int64_t> steps = steps_of(folder, world);
    require(!steps.empty(), ExitCode::checkpoint,
            "{}: no checkpoint in it, nor in a folder {} below it; checkpoint.save_interval writes them, "
            "train --resume auto starts without one",
            folder.path(), kCheckpoints);
    return Chosen{open_verified(folder, steps.back(), world), {}, {}};
}

}  // namespace

std::vector<std::string> messages_of(const Resumed& resumed) {
    std::vector<std::string> lines;
    for (const std::string& refused : resumed.refused)
        lines.push_back("warning: not resumed from a newer checkpoint: " + refused);
    for (const std::string& changed : resumed.changed) {
        const std::string key = changed.substr(0, changed.find(':'));
        lines.push_back(fmt::format("{}: changed since it was saved: {}",
                                    changed == kOtherVersion || changes_the_model(key) ? "warning" : "note",
                                    changed));
    }
    if (!resumed.more_data.empty()) lines.push_back("note: " + resumed.more_data);
    if (resumed.held_out_before > 0)
        lines.push_back(
            fmt::format("warning: data.data_path: files that are held out and were trained on before: {}; "
                        "the held-out loss is too low",
                        resumed.held_out_before));
    for (const std::string& rule : resumed.kept)
        lines.push_back(fmt::format(
            "warning: {}: the run goes on with the rule of its checkpoint; set the key to choose one", rule));
    return lines;
}

std::optional<Resumed> resume(Trainer& trainer, const Config& config, const data::TokenSource& data,
                              ProcessGroup& world, const std::string& save_folder, std::shared_ptr<Disk> disk,
                              const Accept& accept) {
    const std::string& load = config.checkpoint.load;
    if (load.empty()) return std::nullopt;
    Target target = target_of(load, save_folder);
    std::unique_ptr<CheckpointFolder> folder;
    if (load != "auto") {
        on_all_ranks(world, [&] { existing("checkpoint.load", load, ExitCode::checkpoint); });
        enter_run(target, *disk, world);
    }
    on_all_ranks(world, [&] { folder = std::make_unique<CheckpointFolder>(std::move(disk), target.folder); });
    const auto chosen = choose(load, target, *folder, world, accept);
    if (!chosen) return std::nullopt;
    const CheckpointReader& reader = *chosen->reader;
    const bool weights_alone = config.checkpoint.finetune;
    std::vector<StateTensor> state = training_state(
        trainer.transformer(), {world.rank(), world.size(), config.parallel.expert_model_parallel_size});
    if (weights_alone)
        std::erase_if(state, [](const StateTensor& tensor) { return !is_weight(tensor.name); });
    std::shared_ptr<const data::TokenSource> less;
    on_all_ranks(world, [&] {
        const auto before = saved_config(reader.manifest());
        check_tensors(reader, state, weights_alone,
                      {.then = before && !before->training.freeze.names.empty(),
                       .now = !config.training.freeze.names.empty()});
        if (!weights_alone) less = check_position(reader, config, data);
    });
    on_all_ranks(world, [&] { copy_to_device(reader, state, trainer.ops().device()); });
    const CheckpointManifest& saved = reader.manifest();
    if (weights_alone)
        trainer.resume_at(0, 0);
    else
        trainer.resume_at(saved.step, saved.applied_steps.value_or(saved.step));
    trainer.set_first_batch(weights_alone ? 0
                                          : saved.consumed_samples / saved.global_batch_size - saved.step);
    on_all_ranks(world, [&] {
        for (const int64_t step : chosen->refused_steps)
            if (world.rank() == 0) folder->set_aside(step);
    });
    Resumed resumed{
        .step = trainer.steps_done(),
        .path = reader.path(),
        .run = saved.run,
        .refused = chosen->refused,
        .config = config,
        .by_size = !weights_alone && is_old(saved) && data.fingerprint() != saved.data_fingerprint};
    if (less) {
        trainer.set_first_batch(-saved.step);
        resumed.more_data = fmt::format(
            "data.data_path has more than when it was saved: {} samples of that were read; the run goes on "
            "with sample 0 of all, in an order of {} samples per epoch",
            saved.consumed_samples, data.samples_per_epoch(data::Split::train));
        resumed.held_out_before = data::held_out_in(data, *less);
    }
    compare_configs(reader, weights_alone, resumed);
    trainer.follow_rules_of(resumed.config);
    return resumed;
}

}  // namespace fp8flow::checkpoint
