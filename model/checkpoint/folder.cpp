// SPDX-License-Identifier: MIT
// Every change of the folder, one call of Disk after the other.
#include "model/checkpoint/folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace fp8flow::checkpoint {

namespace {

constexpr std::string_view kPrefix = "step_", kUnfinished = ".tmp", kRefused = ".refused";

std::string unfinished(int64_t step) { return checkpoint_name(step) + std::string(kUnfinished); }

bool is_part(std::string_view name) {
    return name == kManifestName || (name.starts_with("rank_") && name.ends_with(".safetensors"));
}

// Throws for minus an error number.
void require_done(int64_t result, const std::string& path, std::string_view what) {
    require(result >= 0, class_of(static_cast<int>(-result), ExitCode::checkpoint), "{}: cannot {}: {}", path,
            what, reason(result));
}

}  // namespace

std::string checkpoint_name(int64_t step) { return fmt::format("{}{:08d}", kPrefix, step); }

std::optional<int64_t> step_of_name(std::string_view name) {
    const std::string_view digits = name.substr(std::min(kPrefix.size(), name.size()));
    int64_t step = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), step);
    return step >= 0 && checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

CheckpointFolder::CheckpointFolder(std::shared_ptr<Disk> disk, const std::string& path)
    : disk_(std::move(disk)), path_(path), folder_(*disk_, disk_->open_folder(path)) {
    require_done(folder_.get(), path, "open the folder of checkpoints");
}

void CheckpointFolder::check(int64_t result, const std::string& name, std::string_view what) const {
    require_done(result, path_of(name), what);
}

std::vector<int64_t> CheckpointFolder::steps() const {
    std::vector<std::string> names;
    check(disk_->list(folder_.get(), names), "", "list the folder");
    std::vector<int64_t> steps;
    for (const std::string& name : names)
        if (const auto step = step_of_name(name)) steps.push_back(*step);
    std::ranges::sort(steps);
    return steps;
}

DiskHandle CheckpointFolder::open_checkpoint(int64_t step) const {
    DiskHandle folder(*disk_, disk_->open_folder(folder_.get(), checkpoint_name(step)));
    require_read(folder.get(), path_of(checkpoint_name(step)));
    return folder;
}

CheckpointManifest CheckpointFolder::manifest(int64_t step) const {
    const std::string where = path_of(checkpoint_name(step)) + "/" + kManifestName;
    const DiskHandle folder = open_checkpoint(step);
    const DiskHandle file(*disk_, disk_->open_file(folder.get(), kManifestName));
    require_read(file.get(), where);
    const int64_t size = disk_->size(file.get());
    require_read(size, where);
    require(size <= kMaxManifestBytes, ExitCode::checkpoint, "{}: {} bytes, a manifest has at most {}", where,
            size, kMaxManifestBytes);
    std::string text(static_cast<size_t>(size), '\0');
    require_read(read_all(*disk_, file.get(), text.data(), text.size(), 0), where + ": cannot read it");
    CheckpointManifest manifest = parse_manifest(text, where);
    require(manifest.step == step, ExitCode::checkpoint, "{}: the manifest is that of step {}",
            path_of(checkpoint_name(step)), manifest.step);
    return manifest;
}

// Removes the files of a checkpoint and the folder. Any other file in it stays, and is an error.
void CheckpointFolder::remove_checkpoint(const std::string& name) {
    const DiskHandle folder(*disk_, disk_->open_folder(folder_.get(), name));
    check(folder.get(), name, "open it");
    std::vector<std::string> files;
    check(disk_->list(folder.get(), files), name, "list it");
    for (const std::string& file : files)
        if (is_part(file)) check(disk_->remove_file(folder.get(), file), name + "/" + file, "remove it");
    std::erase_if(files, [](const std::string& file) { return is_part(file); });
    require(files.empty(), ExitCode::checkpoint, "{}: {} is not a file of a checkpoint and stays; remove it",
            path_of(name), files.empty() ? "" : files.front());
    check(disk_->remove_folder(folder_.get(), name), name, "remove it");
}

void CheckpointFolder::try_to_remove(const std::string& name, std::vector<std::string>& problems) {
    try {
        remove_checkpoint(name);
    } catch (const Error& error) {
        problems.emplace_back(error.what());
    }
}

std::vector<std::string> CheckpointFolder::clean_up() {
    std::vector<std::string> names, problems;
    check(disk_->list(folder_.get(), names), "", "list the folder");
    for (const std::string& name : names) {
        if (!name.ends_with(kUnfinished)) continue;
        if (step_of_name(std::string_view(name).substr(0, name.size() - kUnfinished.size())))
            try_to_remove(name, problems);
    }
    return problems;
}

void CheckpointFolder::begin(int64_t step) {
    int made = disk_->make_folder(folder_.get(), unfinished(step));
    if (made == -EEXIST) {  // one that clean_up could not remove
        set_aside(unfinished(step), step);
        made = disk_->make_folder(folder_.get(), unfinished(step));
    }
    check(made, unfinished(step), "make the folder");
}

void CheckpointFolder::write_manifest(int64_t step, std::string_view text) {
    Part part(*this, step, kManifestName);
    part.write(text.data(), text.size());
    part.finish();
}

void CheckpointFolder::publish(int64_t step) {
    check(disk_->rename(folder_.get(), unfinished(step), checkpoint_name(step)), unfinished(step),
          "rename it to " + checkpoint_name(step));
    check(disk_->sync(folder_.get()), "", "sync the folder");
}

void CheckpointFolder::abandon(int64_t step) {
    std::vector<std::string> left;  // the next run's clean_up removes it
    try_to_remove(unfinished(step), left);
}

std::vector<std::string> CheckpointFolder::keep_latest(int64_t count, std::optional<uint64_t> run) {
    std::vector<std::string> problems;
    const auto is_of_run = [&](int64_t step) {
        try {
            return !run || manifest(step).run == *run;
        } catch (const Error&) {  // its owner is not known
            return false;
        }
    };
    try {
        std::vector<int64_t> all = steps();
        std::erase_if(all, [&](int64_t step) { return !is_of_run(step); });
        all.resize(all.size() - std::min(all.size(), static_cast<size_t>(count)));
        for (const int64_t step : all) {
            check(disk_->rename(folder_.get(), checkpoint_name(step), unfinished(step)),
                  checkpoint_name(step), "rename it before its removal");
            check(disk_->sync(folder_.get()), "", "sync the folder");
            try_to_remove(unfinished(step), problems);
        }
    } catch (const Error& error) {
        problems.emplace_back(error.what());
    }
    return problems;
}

void CheckpointFolder::set_aside(const std::string& name, int64_t step) {
    constexpr int kMostAside = 1000;
    const std::string first = checkpoint_name(step) + std::string(kRefused);
    std::string aside = first;
    int renamed = disk_->rename(folder_.get(), name, aside);
    for (int number = 2; renamed == -EEXIST && number <= kMostAside; ++number) {
        aside = fmt::format("{}-{}", first, number);
        renamed = disk_->rename(folder_.get(), name, aside);
    }
    check(renamed, name, "rename it to " + aside);
    check(disk_->sync(folder_.get()), "", "sync the folder");
}

CheckpointFolder::Part::Part(const CheckpointFolder& folder, int64_t step, const std::string& name)
    : disk_(folder.disk()), path_(folder.path_of(unfinished(step) + "/" + name)) {
    folder_ = {disk_, disk_.open_folder(folder.folder_.get(), unfinished(step))};
    // Another rank has made it.
    require(folder_.get() != -ENOENT, ExitCode::checkpoint,
            "{}: its folder is not there: checkpoint.save must be on a file system that all ranks share",
            path_);
    require_done(folder_.get(), path_, "open its folder");
    file_ = {disk_, disk_.create_file(folder_.get(), name)};
    require_done(file_.get(), path_, "create it");
}

void CheckpointFolder::Part::write(const void* data, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(data);
    while (bytes > 0) {
        const size_t count = std::min(bytes, static_cast<size_t>(kBlockBytes) - block_.size());
        block_.insert(block_.end(), from, from + count);
        from += count;
        bytes -= count;
        if (block_.size() == static_cast<size_t>(kBlockBytes)) flush();
    }
}

void CheckpointFolder::Part::flush() {
    require_done(write_all(disk_, file_.get(), block_.data(), block_.size()), path_, "write it");
    block_.clear();
}

void CheckpointFolder::Part::finish() {
    flush();
    require_done(disk_.sync(file_.get()), path_, "sync it");
    require_done(file_.close(), path_, "close it");
    require_done(disk_.sync(folder_.get()), path_, "sync its folder");
}

}  // namespace fp8flow::checkpoint
