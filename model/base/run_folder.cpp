// SPDX-License-Identifier: MIT
// Chooses the folder of a run, and removes what was made if the run does not start.
#include "model/base/run_folder.h"

#include "kernels/core/error.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <regex>
#include <thread>
#include <utility>

namespace fp8flow {

namespace fs = std::filesystem;

namespace {

constexpr int kMostNumbers = 10000;

bool is_exported(const std::string& name) {
    static const std::regex names(
        R"(config\.json|model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json)");
    return std::regex_match(name, names);
}

// What the commands write into their folder, today and in earlier versions, and into those below it.
constexpr std::array<const char*, 2> kFolders = {"gradients", "hf"};
bool is_written_by_runs(const std::string& name) {
    static const std::regex names(
        R"((train|validate|profile|replay)\.log|config\.yaml|loss\.(svg|jsonl)|)"
        R"((metrics|tensor_stats)\.jsonl|samples\.npy|)"
        R"((calibration|evaluate|validate|profile|replay|run)\.json|routing\.safetensors|)"
        R"((ablation|profile|timeline)\.svg|bench\.(csv|json|md|svg|txt)|replay\.safetensors|)"
        R"((intermediates|trace)\.rank\d+\.(safetensors|json))");
    return std::regex_match(name, names) || std::ranges::find(kFilesOfTheEnd, name) != kFilesOfTheEnd.end();
}

// Of validate: folders in runs/ with a run.json.
std::vector<std::string> jobs_below(const std::string& runs) {
    std::vector<std::string> jobs;
    std::error_code error;
    if (fs::is_symlink(fs::symlink_status(runs, error))) return jobs;
    for (const auto& entry : fs::directory_iterator(runs, error))
        if (!entry.is_symlink(error) && fs::exists(entry.path() / "run.json", error))
            jobs.push_back(entry.path().string());
    return jobs;
}

// Hidden files are locks and what a process that died was writing; a start that was killed leaves an empty
// folder of checkpoints.
bool is_free(const std::string& path) {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(path, error)) {
        if (entry.path().filename().string().starts_with('.')) continue;
        if (!entry.is_directory(error) || entry.is_symlink(error) || !is_free(entry.path())) return false;
    }
    return true;
}

std::string without_trailing_slashes(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path;
}

// The folders on the way to `path` that are not there, outer before inner.
std::vector<std::string> missing_folders(const std::string& path) {
    std::vector<std::string> missing;
    std::error_code error;
    for (fs::path at = fs::absolute(path, error).lexically_normal(); at.has_relative_path();
         at = at.parent_path()) {
        if (fs::exists(fs::symlink_status(at, error))) break;
        missing.push_back(at.string());
    }
    std::reverse(missing.begin(), missing.end());
    return missing;
}

// Regular files in the folder and in those right below, which are no links.
std::vector<std::string> files_of_run(const std::string& folder) {
    std::vector<std::string> paths;
    std::error_code error;
    for (auto at =
             fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied, error);
         at != fs::recursive_directory_iterator(); at.increment(error)) {
        if (at.depth() > 0) at.disable_recursion_pending();
        if (at->symlink_status(error).type() == fs::file_type::regular) paths.push_back(at->path().string());
    }
    return paths;
}

// A TensorBoard file as report::EventFile names it: events.out.tfevents.SECONDS.HOST.PROCESS, no dot in HOST.
bool is_event_file(const std::string& path) {
    static const std::regex names(R"(events\.out\.tfevents\.\d+\.[^.]*\.\d+)");
    return std::regex_match(fs::path(path).filename().string(), names);
}

}  // namespace

RunFolder::RunFolder(const Request& request, ProcessGroup& world)
    : name_(without_trailing_slashes(request.path)), overwrites_(request.taken == Taken::overwrite) {
    try {
        if (world.rank() == 0) request.taken == Taken::next ? take_next(request) : take_this(request);
        if (folder_) folder_->remove_leftovers();
        for (const OutputFolder& below : folders_below()) below.remove_leftovers();
        world.broadcast(name_, 0);
    } catch (...) {
        close();
        throw;
    }
}

RunFolder::~RunFolder() { close(); }

void RunFolder::open(const Request& request) {
    made_ = missing_folders(name_);
    folder_.emplace(name_, request.key);
    lock_ =
        std::make_unique<FolderLock>(folder_->descriptor(), folder_->path(), request.command, request.holder);
}

// Removes what was made, unless it is kept; only what is empty can be removed.
void RunFolder::close() {
    if (lock_ && !kept_ && !made_.empty()) lock_->remove_file();
    lock_.reset();
    folder_.reset();
    if (!kept_)
        for (auto path = made_.rbegin(); path != made_.rend(); ++path) ::rmdir(path->c_str());
    made_.clear();
}

FolderLock::Attempt RunFolder::try_to_take(const Request& request) {
    if (!folder_) open(request);
    const FolderLock::Attempt attempt = lock_->try_to_take();
    if (attempt == FolderLock::Attempt::gone) close();  // by a run that did not start
    return attempt;
}

// A run that has just been ended may still hold the folder.
void RunFolder::take_this(const Request& request) {
    constexpr std::chrono::milliseconds kBetweenAttempts{100};
    const auto began = std::chrono::steady_clock::now();
    for (FolderLock::Attempt attempt{}; (attempt = try_to_take(request)) != FolderLock::Attempt::taken;) {
        require(
            attempt == FolderLock::Attempt::gone || std::chrono::steady_clock::now() - began < request.wait,
            ExitCode::output,
            "{} {}: {} is running in it; choose another folder, wait for its end, or end it with --take-over",
            request.key, name_, lock_ ? lock_->holder() : "another run");
        std::this_thread::sleep_for(kBetweenAttempts);
    }
}

void RunFolder::take_next(const Request& request) {
    const std::string asked = name_;
    for (int number = 1; number <= kMostNumbers;) {
        name_ = number == 1 ? asked : fmt::format("{}-{}", asked, number);
        open(request);
        const FolderLock::Attempt attempt =
            is_free(folder_->path()) ? try_to_take(request) : FolderLock::Attempt::held;
        if (attempt == FolderLock::Attempt::gone) continue;
        // Checks again: another run may have written here and ended meanwhile.
        if (attempt == FolderLock::Attempt::taken && is_free(folder_->path())) {
            if (number > 1)
                note_ = fmt::format(
                    "warning: {} holds another run: this one goes to {} (--overwrite replaces "
                    "the other, train --resume auto continues it{})",
                    asked, name_,
                    request.holder == FolderLock::Holder::is_replaced ? "; --take-over needs one of them"
                                                                      : "");
            return;
        }
        close();
        ++number;
    }
    fail(ExitCode::output, "{} {}: it and {} folders with a number are taken; choose another", request.key,
         asked, kMostNumbers - 1);
}

void RunFolder::keep() {
    const bool first = !std::exchange(kept_, true);
    if (!first || !overwrites_ || !folder_) return;
    for (const OutputFolder& below : folders_below()) {
        remove_exported(below);
        below.remove_files(
            [](const std::string& name) { return std::ranges::count(kCarriedFiles, name) > 0; });
        below.remove_files(is_written_by_runs);
    }
    folder_->remove_files(is_written_by_runs);
    std::error_code error;
    for (const std::string& job : jobs_below(folder_->path_of("runs"))) {
        OutputFolder(job).remove_files(
            [](const std::string& name) { return name == ".lock" || is_written_by_runs(name); });
        fs::remove_all(job + "/checkpoints", error);
        fs::remove(job, error);  // if it is empty
    }
    for (const std::string& path : files_of_run(folder_->path()))
        if (is_event_file(path)) fs::remove(path, error);
}

std::vector<OutputFolder> RunFolder::folders_below() const {
    std::vector<OutputFolder> folders;
    std::error_code error;
    for (const char* name : kFolders) {
        if (!folder_ || !fs::is_directory(fs::symlink_status(folder_->path_of(name), error))) continue;
        // a folder that the user has protected is refused only where it would have to be emptied
        if (overwrites_ || ::access(folder_->path_of(name).c_str(), W_OK) == 0)
            folders.push_back(folder_->subfolder(name));
    }
    return folders;
}

void remove_exported(const OutputFolder& folder) { folder.remove_files(is_exported); }

void RunFolder::check() const {
    if (lock_) lock_->check();
}

void RunFolder::check_if_unsure() const {
    if (lock_) lock_->check_if_unsure();
}

}  // namespace fp8flow
