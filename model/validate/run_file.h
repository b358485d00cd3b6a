// SPDX-License-Identifier: MIT
// The file of a job, an arm trained with one seed: runs/ARM-SEED.json below the output folder. validate.json,
// the report and the terminal are made of these files alone, so it does not matter which process wrote them.
// They are equal for equal runs but for the object "measured" (times, memory, machine, command).
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/validate/arms.h"
#include "model/validate/validate.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::validate {

inline constexpr const char* kRuns = "runs";  // the folder

// "bf16_control-3", the name of its files; signs that file names do not have become '_'.
std::string job_name(const std::string& arm, int64_t seed);

// What the file says before the training. The other runs of a validation must agree with it in "commit",
// "backend", "ranks", "data", "routing of" and "configuration" (without the arm's keys and what says where a
// run writes), those with this seed in "order" and "initial weights" too, and those of this arm in "keys".
struct Origin {
    const Arm& arm;
    int64_t number = 0;  // of the arm, in the order of the report
    int64_t seed = 0;
    const Config& config;  // that the arms have in common
    const Provenance& provenance;
    uint64_t data = 0, order = 0;   // fingerprints with training.seed and with `seed`
    const std::string& routing_of;  // arm that the others take their routing from; empty: none
};
nlohmann::json begin_run_file(const Origin& origin);

// A file, and where it is, for messages.
struct RunFile {
    nlohmann::json content;
    std::string path;
};
// Throws Error(usage) with the item in which two of them differ.
void check_agree(const std::vector<RunFile>& files);

// `folder`, or those below it in which --only has left runs; `folder` if there are none.
std::vector<std::string> folders_with_runs(const std::string& folder);
// All in the folder runs/ of `folder`; none where there is no such folder. Throws Error(data).
std::vector<RunFile> read_run_files(const std::string& folder);
// By arm, then by seed.
void sort_run_files(std::vector<RunFile>& files);

// "ARM:SEED" of the arms and seeds among sorted files that have no run together.
std::vector<std::string> missing_jobs(const std::vector<RunFile>& files);

// A curve of a run that diverged ends before that step.
Run run_of(const nlohmann::json& file);
// Of the process that makes a report, on the machine that trained.
Provenance with_machine(Provenance provenance, const nlohmann::json& file);
// The arms of sorted files; their configurations are not known.
std::vector<Arm> arms_of(const std::vector<RunFile>& files);

}  // namespace fp8flow::validate
