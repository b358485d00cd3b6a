// SPDX-License-Identifier: MIT
// report.html of `train` and of `validate`.
#pragma once

#include "model/report/page/page.h"
#include "model/report/run_report.h"
#include "model/report/tensor_stats.h"
#include "model/validate/outcome.h"

#include <optional>
#include <string>

namespace fp8flow::report {

// What the title of a run's page is made from.
struct RunTitle {
    std::string name;  // run_name
    const Config& config;
    const Provenance& provenance;
};

// What accumulates over the iterations of a run.
struct RunSums {
    Series losses, held_out;  // nats
    RoutingHistory routing;
    TensorHistory tensors;
};

struct TrainResult {
    const RunSums& sums;
    std::optional<double> floor = {};  // entropy of the source
    int64_t steps_done = 0;
    int64_t first_step = 0;                     // of this start; the next two are from it on
    double seconds = 0, tokens_per_second = 0;  // all ranks
    const StepResult& last;
    const MemoryUse& memory;
};
std::string train_page(const RunTitle& title, const TrainResult& run);

// `routing`: groups of RoutingHistory.
std::string validate_page(const RunTitle& title, const validate::Outcomes& outcomes, nlohmann::json routing);

}  // namespace fp8flow::report
