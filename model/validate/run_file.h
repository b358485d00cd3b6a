// SPDX-License-Identifier: MIT
// The file of a job, an arm trained with one seed: runs/ARM-SEED/run.json below the output folder.
// validate.json, the report and the terminal are made of these files alone, so it does not matter which
// process wrote them. They are equal for equal runs but for the object "measured" (times, memory, machine,
// command).
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/validate/arms.h"
#include "model/validate/statistics.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::validate {

inline constexpr const char *kRuns = "runs", *kRunFile = "run.json";

// "bf16_control-3", the name of its folder; signs that file names do not have become '_'.
std::string job_name(const std::string& arm, int64_t seed);

// The keys that decide what a run computes, in "configuration".
nlohmann::json compared_keys(const Config& config);

// A file, and where it is, for messages.
struct RunFile {
    nlohmann::json content;
    std::string path;
    bool is_done() const { return content.contains("measured"); }
};
// Throws Error(usage) with the item in which two of them differ. All agree in "commit", "backend", "ranks",
// "data", "routing of" and "configuration" (without the arm's keys), those with one seed in "order" and
// "initial weights" too, and those of one arm in "keys". Commits that are both in `equal_commits` agree;
// a key that one of their programs did not have yet has its default there.
void check_agree(const std::vector<RunFile>& files, const std::vector<std::string>& equal_commits);

// With every real number as the shortest decimal that is the same in FP32, as losses are: half the bytes.
nlohmann::json shortened(nlohmann::json values);

// All below runs/ of `folder`, by arm, then by seed; none where there is no such folder. Throws Error(data).
std::vector<RunFile> read_run_files(const std::string& folder);
void sort_run_files(std::vector<RunFile>& files);

// "ARM:SEED" of the arms and seeds among sorted files that have no run together.
std::vector<std::string> missing_jobs(const std::vector<RunFile>& files);

// A curve of a run that diverged ends before that step.
Run run_of(const nlohmann::json& file);
// Of the process that makes a report, with commit and machine of the one that trained.
Provenance as_trained(Provenance provenance, const nlohmann::json& file);
// The arms of sorted files; their configurations are not known.
std::vector<Arm> arms_of(const std::vector<RunFile>& files);

}  // namespace fp8flow::validate
