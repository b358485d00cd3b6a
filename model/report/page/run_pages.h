// SPDX-License-Identifier: MIT
// report.html of `train` and of `validate`.
#pragma once

#include "model/report/loss_pictures.h"
#include "model/report/page/page.h"
#include "model/report/run_report.h"

#include <string>
#include <vector>

namespace fp8flow::report {

struct TrainEnd {
    int64_t steps_done = 0;
    double seconds = 0;
    const StepResult& last;
    const MemoryUse& memory;
    const RoutingHistory& routing;
};
std::string train_page(const RunTitle& title, const TrainLosses& losses, const TrainEnd& end);

// `routing`: one a curve.
std::string validate_page(const RunTitle& title, const ValidateLosses& losses,
                          const std::vector<RoutingHistory>& routing);

}  // namespace fp8flow::report
