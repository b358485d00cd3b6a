// SPDX-License-Identifier: MIT
// Sums are kept as they were at checkpoints; files are cut.
#include "model/commands/train_records.h"

#include "model/report/records.h"
#include "model/report/run_report.h"

#include <filesystem>

namespace fp8flow {

using namespace report;

std::vector<std::string> TrainRecords::open(const OutputFolder& folder, int64_t kept) {
    folder_ = &folder;
    std::error_code error;
    if (kept < config_.training.train_iters)
        for (const char* name : {kPageFile, "memory.json", "tensor_stats.json", "transposed_stats.json"})
            std::filesystem::remove(folder.path_of(name), error);
    forget_events_after(folder, kept);
    open_events();
    const std::string path = folder.path_of("metrics.jsonl");
    if (!config_.output.metrics &&
        !std::filesystem::is_regular_file(std::filesystem::symlink_status(path, error)))
        return {};
    const std::vector<nlohmann::json> records = records_until(folder, kept);
    metrics_.emplace(open_metrics(folder, records));
    if (!config_.output.metrics) metrics_.reset();
    if (!config_.output.metrics && records.empty()) std::filesystem::remove(path, error);
    const auto add = [](Series& series, const nlohmann::json& record, const char* key) {
        if (!record.contains(key) || !record[key].is_number()) return;
        series.x.push_back(record["iteration"].get<double>());
        series.y.push_back(record[key].get<double>());
    };
    for (const nlohmann::json& record : records) {
        sums_.routing.add(record);
        add(sums_.losses, record, "lm_loss");
        add(sums_.held_out, record, "held_out_loss");
    }
    std::vector<std::string> warnings;
    if (const std::string missing = missing_iterations(records, kept); !missing.empty())
        warnings.push_back(
            fmt::format("metrics.jsonl has no whole record of these iterations: {}; {} leaves them out",
                        missing, kPageFile));
    if (std::string old = note_of_old_losses(records); !old.empty()) warnings.push_back(std::move(old));
    return warnings;
}

void TrainRecords::open_events() {
    if (!config_.output.tensorboard_dir.empty())
        events_.emplace(folder_->subfolder(config_.output.tensorboard_dir));
}

void TrainRecords::add(const StepResult& result, int64_t allocated_bytes, const Provenance* provenance) {
    const int64_t iteration = result.step + 1;
    if (result.skipped.empty()) {
        sums_.losses.x.push_back(static_cast<double>(iteration));
        sums_.losses.y.push_back(result.lm_loss);
        sums_.routing.add(iteration, result.load);
    }
    if (metrics_ && provenance != nullptr) metrics_->write_json(run_json(iteration, *provenance));
    if (metrics_) metrics_->write_json(step_json(config_, result, world_size_));
    if (events_ && iteration % config_.output.tensorboard_log_interval == 0)
        events_->step(config_, result, world_size_, allocated_bytes);
}

void TrainRecords::add_evaluation(int64_t iteration, double nats) {
    sums_.held_out.x.push_back(static_cast<double>(iteration));
    sums_.held_out.y.push_back(nats);
    if (events_) events_->evaluation(config_, iteration, nats);
    if (metrics_) metrics_->write_json(evaluation_json(iteration, nats));
}

void TrainRecords::remember(int64_t step) {
    // Runs go back to the newest checkpoint, and to an older one only where that is damaged.
    constexpr size_t kMostRemembered = 3;
    if (config_.training.on_divergence != OnDivergence::rollback) return;
    remembered_[step] = sums_;
    if (remembered_.size() > kMostRemembered) remembered_.erase(remembered_.begin());
}

void TrainRecords::go_back(int64_t step) {
    const auto later = remembered_.upper_bound(step);
    sums_ = later == remembered_.begin() ? Sums{} : std::prev(later)->second;
    if (metrics_) metrics_.emplace(open_metrics(*folder_, records_until(*folder_, step)));
    if (!events_) return;
    forget_events_after(*folder_, step);
    open_events();
}

}  // namespace fp8flow
