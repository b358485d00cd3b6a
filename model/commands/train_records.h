// SPDX-License-Identifier: MIT
// TrainRecords: what accumulates over the iterations of `fp8flow train`, in memory and files: curves,
// routing, tensor statistics, metrics.jsonl, tensor_stats.jsonl, TensorBoard's files. An iteration that is
// done again, because the run resumed or went back to a checkpoint, counts once. Read next: report/records.h,
// report/tensorboard.h.
#pragma once

#include "layers/tensor_stats.h"
#include "model/base/output.h"
#include "model/base/provenance.h"
#include "model/report/page/run_pages.h"
#include "model/report/tensorboard.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

// Which experts received tokens lately.
class ExpertUse {
public:
    void add(const StepResult& result);
    // About experts that received no token lately though an even share is many tokens; empty: none.
    std::string warning() const;

private:
    std::map<int, std::vector<int64_t>> last_;  // by layer: the last iteration with tokens for each expert
    int64_t first_ = 0, iteration_ = 0;         // of those that were added
    double tokens_ = 0;                         // of a layer in the last one
};

class TrainRecords {
public:
    // The records in a run's folder. Only rank 0 calls open. The configuration must outlive this object.
    explicit TrainRecords(const Config& config) : config_(config) {}

    // Reads and keeps the iterations up to `kept`, which the run did before a resume. Removes later ones, and
    // the files that a run writes at its end. Returns warnings about records.
    std::vector<std::string> open(const OutputFolder& folder, int64_t kept);
    // `provenance`: given with the first step after a start.
    void add(const report::StepValues& values, const Provenance* provenance);
    void add_evaluation(int64_t iteration, double nats);

    // The run goes back to a checkpoint. Without metrics.jsonl the sums begin there.
    void go_back(int64_t step);

    const report::RunSums& sums() const { return sums_; }  // of the iterations so far
    // Adds the tensor statistics of an iteration to the file, TensorBoard and the history.
    void add_tensor_stats(int64_t iteration);
    TensorStats& tensor_stats() { return tensor_stats_; }

private:
    void open_events(int64_t done);
    int64_t read_kept(int64_t kept);  // returns how many iterations have no record
    // Writes the records, and opens the file to go on.
    void keep(const char* name, const std::vector<nlohmann::json>& records, std::optional<LineFile>& file);
    void add(const nlohmann::json& record);  // to the sums

    const Config& config_;
    const OutputFolder* folder_ = nullptr;
    report::RunSums sums_;
    TensorStats tensor_stats_;
    std::optional<LineFile> metrics_, stats_lines_;
    std::optional<report::EventFile> events_;
};

}  // namespace fp8flow
