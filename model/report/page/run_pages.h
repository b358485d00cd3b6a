// SPDX-License-Identifier: MIT
// report.html of `train` and of `validate`.
#pragma once

#include "model/report/page/page.h"
#include "model/report/run_report.h"
#include "model/validate/validate.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::report {

// What the title of a run's page is made from.
struct RunTitle {
    std::string name;  // run_name
    const Config& config;
    const Provenance& provenance;
};

struct TrainResult {
    const Series &losses, &held_out;   // over iterations, nats
    std::optional<double> floor = {};  // entropy of the source
    int64_t steps_done = 0;
    double seconds = 0, tokens_per_second = 0;  // all ranks
    const StepResult& last;
    const MemoryUse& memory;
    const RoutingHistory& routing;
};
std::string train_page(const RunTitle& title, const TrainResult& run);

struct ValidateLosses {
    const std::vector<validate::Curve>& curves;            // the baseline first
    const std::vector<validate::Comparison>& comparisons;  // of the others
    std::optional<double> noise;                           // the control arm's largest error
    std::string verdict;
    std::string control_arm;  // its name
};
// `routing`: one per curve.
std::string validate_page(const RunTitle& title, const ValidateLosses& losses,
                          const std::vector<RoutingHistory>& routing);

}  // namespace fp8flow::report
