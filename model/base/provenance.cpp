// SPDX-License-Identifier: MIT
// Filling the provenance of a result and writing it into JSON.
#include "model/base/provenance.h"

#include "model/base/build_info.h"

#include <nlohmann/json.hpp>

#include <ctime>

namespace fp8flow {

namespace {

std::string utc_now() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    ::gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    return text;
}

template <class Json> void add(Json& result, const Provenance& provenance) {
    const MachineFacts& facts = provenance.machine;
    result["commit"] = provenance.commit;
    result["command"] = provenance.command;
    result["date"] = provenance.date;
    Json& machine = result["machine"];
    machine["gpu"] = facts.gpu.empty() ? Json(nullptr) : Json(facts.gpu);
    machine["gpu clock hertz"] = facts.gpu_clock_hertz > 0 ? Json(facts.gpu_clock_hertz) : Json(nullptr);
    machine["cpu"] = facts.cpu;
    machine["host cores"] = facts.host_cores;
    machine["gpus"] = provenance.gpus;
    machine["ranks"] = provenance.ranks;
}

}  // namespace

Provenance make_provenance(const std::string& command, const BackendChoice& choice, int64_t ranks) {
    return {.commit = build_commit(),
            .command = command,
            .date = utc_now(),
            .machine = machine_facts(choice),
            .ranks = ranks,
            .gpus = choice.kind == BackendKind::hopper ? ranks : 0};
}

void add_provenance(nlohmann::json& result, const Provenance& provenance) { add(result, provenance); }
void add_provenance(nlohmann::ordered_json& result, const Provenance& provenance) { add(result, provenance); }

}  // namespace fp8flow
