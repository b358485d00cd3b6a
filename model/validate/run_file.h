// SPDX-License-Identifier: MIT
// The file of a job, an arm trained with one seed: runs/ARM-SEED/run.json below the output folder.
// validate.json, the report and the printed result are made from these files alone, so any process may have
// written them. Equal runs have equal files, except for the object "measured" (times, memory, machine,
// command).
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/validate/outcome.h"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace fp8flow::validate {

inline constexpr const char *kRuns = "runs", *kRunFile = "run.json", *kChecksum = "checksum";

// Of an arm; characters that file names do not have become '_'.
std::string file_name_of(const std::string& arm);
// "bf16_control-3", the name of its folder.
std::string job_name(const std::string& arm, int64_t seed);

// The keys that decide what a run computes, in "configuration".
nlohmann::json compared_keys(const Config& config);

// A file, and where it is, for messages.
struct RunFile {
    nlohmann::json content;
    std::string path;
    std::string arm() const { return content.at("arm"); }
    int64_t seed() const { return content.at("seed"); }
    bool is_done() const { return content.contains("measured"); }
};
// Throws Error(usage) with the item in which two files differ. All must agree in "commit", "backend",
// "ranks", "data", "routing of" and "configuration" (without the arm's keys), those with one seed also in
// "order" and "initial weights", those of one arm also in "keys", "against", "validate.control_arm" and
// "plugin" (a fingerprint), and must differ in how they begin. Two commits or plugins of `equal_commits`
// count as one. A key that an older program did not have counts as its default.
void check_agree(const std::vector<RunFile>& files, const std::vector<std::string>& equal_commits);

// With every real number as the shortest decimal of its FP32 value: losses are FP32, and take half the bytes.
nlohmann::json shortened(nlohmann::json values);

// Of the results in a file, so that an edit is noticed. Files of earlier versions have none.
std::string checksum_of(const nlohmann::json& file);

// All below runs/ of `folder`, by arm, then by seed; none if there is no such folder. Throws Error(data),
// also if a run that is done is not complete.
std::vector<RunFile> read_run_files(const std::string& folder);
void sort_run_files(std::vector<RunFile>& files);

// "ARM:SEED" for each arm and seed that occur among the files, but not together.
std::vector<std::string> missing_jobs(const std::vector<RunFile>& files);

// A curve of a run that diverged ends before that step.
Run run_of(const nlohmann::json& file);
// The provenance of a report, with commit and machine of the process that trained.
Provenance as_trained(Provenance provenance, const nlohmann::json& file);
// The arms of sorted files; their configurations are not known.
std::vector<Arm> arms_of(const std::vector<RunFile>& files);

}  // namespace fp8flow::validate
