// SPDX-License-Identifier: MIT
// ValidateJobs: trains arms with seeds. Each is a job on its own, which leaves runs/ARM-SEED.json
// (model/validate/run_file.h) and runs/ARM-SEED.jsonl, the metrics of its steps. A job with a file is not run
// again. One that was interrupted continues from its last checkpoint (checkpoint.save_interval), or begins
// again.
#pragma once

#include "model/base/provenance.h"
#include "model/base/run_folder.h"
#include "model/commands/commands.h"
#include "model/report/log.h"
#include "model/report/progress.h"
#include "model/train/trainer.h"
#include "model/validate/run_file.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fp8flow {

struct ValidateJob {
    const validate::Arm* arm;
    int64_t number, seed;  // number: of the arm
    std::string name() const { return validate::job_name(arm->name, seed); }
};
// In the order in which they run: by seed, arm `routing_of` first. `only`: ARM:SEED, as the arm or its files
// are named; empty: all. Throws Error(usage) if `only` is none of them, or `routing_of` no arm.
std::vector<ValidateJob> validate_jobs(const std::vector<validate::Arm>& arms,
                                       const std::vector<int64_t>& seeds, const std::string& only,
                                       const std::string& routing_of);

class ValidateJobs {
public:
    // What all jobs share; all of it outlives this object.
    struct Shared {
        const Config& config;
        const std::vector<validate::Arm>& arms;
        const std::vector<int64_t>& seeds;
        const RunOptions& options;
        const BackendChoice& backend;
        const Provenance& provenance;
        ProcessGroup& world;
        RunFolder& folder;
        report::RunLog& log;
    };
    // Throws Error(usage) on all ranks if the folder has files of other runs.
    ValidateJobs(const Shared& shared, std::vector<ValidateJob> jobs,
                 std::shared_ptr<const data::TokenSource> data);

    // False: a signal asked to stop. Collective.
    bool run();
    // Of this validation's jobs, on the first rank.
    std::vector<validate::RunFile> files() const;

private:
    using Job = ValidateJob;
    class Training;
    std::vector<validate::RunFile> with_this(std::vector<validate::RunFile> files) const;
    std::string label_of(const Job& job) const;  // "fp8_flow", or "fp8_flow seed 2" if there are several
    std::string progress_line(const Job& job, const validate::Curve& curve,
                              const std::optional<validate::Run>& base) const;

    Shared shared_;
    std::shared_ptr<const data::TokenSource> data_;
    std::vector<Job> jobs_;
    std::vector<validate::RunFile> done_;  // on the first rank
    std::optional<OutputFolder> runs_;     // of the first rank
    std::optional<report::EtaEstimator> eta_;
    bool started_ = false;
};

}  // namespace fp8flow
