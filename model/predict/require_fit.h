// SPDX-License-Identifier: MIT
// Refuses a run that will not fit before it takes memory. The message says what it needs, what is free, the
// largest consumers and the keys that shrink them. Read next: fit.h.
#pragma once

#include "kernels/comm/process_group.h"
#include "model/config/config.h"
#include "model/job/backend.h"
#include "model/predict/fit.h"
#include "model/report/run_report.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fp8flow::predict {

enum class WhereShort : uint8_t { refuse, warn };  // warn: --force

// "" if the run fits into `free` bytes of rank `rank`; otherwise one line that says what is missing.
std::string shortage_text(const Config& config, int64_t ranks, double free, const std::string& limit,
                          int rank, Where where = Where::gpu);

// Collective. `runs` run one after the other (arms of validate and profile): the one that needs most counts.
// Throws Error(memory) on every rank where some rank has too little; with WhereShort::warn it is said.
void require_fit(report::RunLog& log, const std::vector<Config>& runs, const BackendChoice& backend,
                 ProcessGroup& world, int64_t ranks_on_host, WhereShort what);

// decide_joined of fit.h for a run: the smallest GPU counts; on the reference backend memory has no limit.
// Collective.
std::string decide_joined(Config& config, const BackendChoice& backend, ProcessGroup& world);

}  // namespace fp8flow::predict
