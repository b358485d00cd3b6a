// SPDX-License-Identifier: MIT
// Continues metrics.jsonl and tensor_stats.jsonl after the iteration at which a run resumes.
#include "model/commands/train_records.h"

#include "model/base/run_folder.h"
#include "model/report/records.h"
#include "model/report/run_report.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

namespace fp8flow {

using namespace report;

void ExpertUse::add(const StepResult& result) {
    iteration_ = result.step + 1;
    if (first_ == 0) first_ = iteration_;
    for (const LayerLoad& load : result.load) {
        std::vector<int64_t>& last = last_[load.layer];
        last.resize(load.tokens.size());
        for (size_t e = 0; e < last.size(); ++e)
            if (load.tokens[e] > 0) last[e] = iteration_;
        tokens_ = f64(std::accumulate(load.tokens.begin(), load.tokens.end(), int64_t{0}));
    }
}

std::string ExpertUse::warning() const {
    constexpr int64_t kLately = 100;
    constexpr double kFairShare = 32;  // tokens; chance leaves no expert out then
    const int64_t before = std::max(first_ - 1, iteration_ - kLately);
    std::vector<std::string> dead;
    for (const auto& [layer, last] : last_) {
        const auto unused = std::ranges::count_if(last, [&](int64_t used) { return used <= before; });
        const double share = tokens_ * f64(iteration_ - before) / f64(last.size());
        if (unused > 0 && share >= kFairShare)
            dead.push_back(fmt::format("{} of layer {}", counted(unused, "expert"), layer));
    }
    if (dead.empty()) return {};
    const size_t layers = dead.size();
    dead.resize(std::min<size_t>(layers, 4));
    return fmt::format(
        "warning: {}{} received no token in the last {}: a balancing loss keeps experts in use "
        "(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff)",
        fmt::join(dead, ", "), layers > 4 ? fmt::format(" and some of {} more layers", layers - 4) : "",
        counted(iteration_ - before, "iteration"));
}

std::vector<std::string> TrainRecords::open(const OutputFolder& folder, int64_t kept) {
    folder_ = &folder;
    std::error_code error;
    if (kept < config_.training.train_iters)
        for (const char* name : kFilesOfTheEnd) std::filesystem::remove(folder.path_of(name), error);
    open_events(kept);
    const int64_t missing = read_kept(kept);
    if (missing == 0) return {};
    return {fmt::format("{} has no whole record of {} up to {}; {} leaves them out", kMetricsFile,
                        counted(missing, "iteration"), kept, kPageFile)};
}

void TrainRecords::open_events(int64_t done) {
    if (!config_.output.tensorboard_dir.empty())
        events_.emplace(folder_->subfolder(config_.output.tensorboard_dir), config_, done);
}

void TrainRecords::keep(const char* name, const std::vector<nlohmann::json>& records,
                        std::optional<LineFile>& file) {
    std::string kept;
    for (const nlohmann::json& record : records) kept += record.dump() + "\n";
    folder_->write_atomic(name, kept);
    file.emplace(folder_->open_lines(name, LineFile::Start::append));
}

void TrainRecords::add(const nlohmann::json& record) {
    if (record.contains("skipped")) return;
    const auto add_to = [&](Series& series, const char* key) {
        if (!record.contains(key) || !record[key].is_number()) return;
        series.x.push_back(record["iteration"].get<double>());
        series.y.push_back(record[key].get<double>());
    };
    add_to(sums_.losses, "lm_loss");
    add_to(sums_.held_out, "held_out_loss");
    sums_.routing.add(record);
}

void TrainRecords::add(const StepValues& values, const Provenance* provenance) {
    add(values.record);
    if (metrics_ && provenance != nullptr) {
        nlohmann::json run = {{"type", "run"}, {"iteration", values.iteration()}};
        add_provenance(run, *provenance);
        metrics_->write_json(flat(run));
    }
    if (metrics_) metrics_->write_json(values.record);
    if (events_ && values.iteration() % config_.output.tensorboard_log_interval == 0) events_->step(values);
}

void TrainRecords::add_evaluation(int64_t iteration, double nats) {
    const nlohmann::json record = {{"type", "evaluation"},
                                   {"iteration", iteration},
                                   {"held_out_loss", nats},
                                   {"bits", nats / std::log(2.0)}};
    add(record);
    if (events_) events_->evaluation(iteration, nats);
    if (metrics_) metrics_->write_json(record);
}

void TrainRecords::add_tensor_stats(int64_t iteration) {
    if (!stats_lines_) return;  // another rank
    std::vector<nlohmann::json> records;
    for (const auto* rows : {&tensor_stats_.rows(), &tensor_stats_.transposed()})
        for (auto row = rows->rbegin(); row != rows->rend() && row->iteration >= iteration; ++row)
            if (row->iteration == iteration) records.insert(records.begin(), tensor_stats_record(*row));
    for (const nlohmann::json& record : records) {
        sums_.tensors.add(record);
        stats_lines_->write_json(record);
    }
    if (events_) events_->tensor_stats(iteration, records);
}

void TrainRecords::go_back(int64_t step) {
    tensor_stats_.forget_from(step + 1);
    sums_ = {};
    if (folder_ == nullptr) return;  // another rank
    read_kept(step);
    open_events(step);
}

// Reads the records up to `kept`, and cuts the files after them.
int64_t TrainRecords::read_kept(int64_t kept) {
    if (config_.output.tensor_stats) {
        const auto observed = read_records(folder_->path_of(kTensorStatsFile), kept);
        keep(kTensorStatsFile, observed, stats_lines_);
        for (const nlohmann::json& record : observed) sums_.tensors.add(record);
    }
    const std::string path = folder_->path_of(kMetricsFile);
    std::error_code error;
    if (!config_.output.metrics &&
        !std::filesystem::is_regular_file(std::filesystem::symlink_status(path, error)))
        return 0;
    const std::vector<nlohmann::json> records = read_records(path, kept);
    keep(kMetricsFile, records, metrics_);
    if (!config_.output.metrics) metrics_.reset();
    if (!config_.output.metrics && records.empty()) std::filesystem::remove(path, error);
    for (const nlohmann::json& record : records) add(record);
    return missing_iterations(records, kept);
}

}  // namespace fp8flow
