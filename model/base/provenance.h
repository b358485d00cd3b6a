// SPDX-License-Identifier: MIT
// Provenance: what a result needs to be read later: commit, command line, date, machine. Every command that
// writes a result JSON fills it here and adds it with add_provenance, so that the keys are the same in all.
#pragma once

#include "model/job/backend.h"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <string>

namespace fp8flow {

struct Provenance {
    std::string commit;    // of the program
    std::string command;   // as typed, with the ranks it started on
    std::string date;      // UTC, "2026-11-20T13:00:00Z"
    MachineFacts machine;  // of rank 0
    int64_t ranks = 1;
    int64_t gpus = 0;  // 0: the reference backend
};

// Of this moment. `command` comes from main, which alone sees the command line.
Provenance make_provenance(const std::string& command, const BackendChoice& choice, int64_t ranks);

// Adds "commit", "command", "date" and "machine" {"gpu", "gpu clock hertz", "cpu", "host cores", "gpus",
// "ranks"}; the GPU's keys are null on the host. Other keys of `result` and of its "machine" stay.
void add_provenance(nlohmann::json& result, const Provenance& provenance);
void add_provenance(nlohmann::ordered_json& result, const Provenance& provenance);

}  // namespace fp8flow
