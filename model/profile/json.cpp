// SPDX-License-Identifier: MIT
// profile.json: every number of the tables, with what is needed to read them later.
#include "model/profile/profile.h"

#include <nlohmann/json.hpp>

namespace fp8flow::profile {

namespace {

using nlohmann::json;

json json_of(const Spread& spread) {
    return {{"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
}

json json_of(const ProfileRow& row) {
    json result = {{"part", row.part},
                   {"stage", row.stage},
                   {"direction", row.direction},
                   {"seconds", json_of(row.seconds)},
                   {"share", row.share},
                   {"bytes", row.bytes},
                   {"flops", row.flops},
                   {"product flops", row.gemm_flops},
                   {"casts", row.casts},
                   {"wire bytes", row.wire_bytes},
                   {"wait seconds", row.wait_seconds},
                   {"runs per step", row.runs},
                   {"memory in use", row.peak_bytes}};
    const double seconds = row.seconds.median;
    if (seconds > 0) {
        result["bytes per second"] = row.bytes / seconds;
        result["flops per second"] = row.flops / seconds;
        if (row.ideal_seconds > 0) result["ceiling share"] = row.ideal_seconds / seconds;
    }
    return result;
}

json machine_json(const MachineRates& machine) {
    return {{"device", machine.device},
            {"copy bytes per second", machine.bytes_per_second},
            {"bf16 flops per second", machine.bf16_flops},
            {"fp8 flops per second", machine.fp8_flops},
            {"peer load bytes per second", machine.peer_load},
            {"peer store bytes per second", machine.peer_store}};
}

// What is not one number of every arm: by rank, by part, and where it was measured.
void add_by_rank_and_part(const ArmProfile& arm, const Profile& profile, json& one) {
    if (!arm.exchange.empty()) one["exchange"] = arm.exchange;
    for (const RankSeconds& rank : arm.by_rank) {
        one["work seconds by rank"].push_back(rank.work.median);
        one["wire seconds by rank"].push_back(rank.wire);
        one["wait seconds by rank"].push_back(rank.waiting);
    }
    if (const auto slowest = slowest_of(arm.by_rank))
        one["slowest rank"] = {
            {"rank", slowest->rank}, {"over median", slowest->over_median}, {"resolved", slowest->resolved}};
    for (const PartTime& part : parts_above_ceiling(arm.rows))
        one["parts above ceiling"].push_back({{"part", part.name},
                                              {"step seconds", part.seconds},
                                              {"step seconds above ceiling", part.above_ceiling()}});
    if (arm.num_hosts > 1) {
        one["wire bytes"]["between hosts"] = arm.wire.between_hosts;
        one["wire bytes"]["inside hosts"] = arm.wire.inside_hosts();
    }
    if (arm.joules_per_step) {
        one["joules per step"] = *arm.joules_per_step;
        one["joules per token"] = *arm.joules_per_step / arm.step_tokens;
    }
    if (const auto joules = arm.passes_joules_per_token()) {
        one["passes joules per token"] = *joules;
        one["passes joules over first"] = *joules / *profile.arms.front().passes_joules_per_token();
        one["passes watts per gpu"] = arm.passes_watts(profile.ranks);
    }
    if (arm.whole.layer.median > 0)
        one["speed-up"] = profile.arms.front().whole.layer.median / arm.whole.layer.median;
    one["speed-up resolved"] = report::resolved(profile.arms.front().whole.layer, arm.whole.layer);
}

}  // namespace

json profile_json(const Profile& profile, const Config& config) {
    json result = {{"ranks", profile.ranks},        {"steps", profile.steps},
                   {"routing", profile.routing},    {"machine", machine_json(profile.machine)},
                   {"config", dump_config(config)}, {"recipes", json::array()}};
    add_provenance(result, profile.provenance);
    if (profile.ablation) result["noise floor"] = nullptr;  // no arm runs twice
    for (const ArmProfile& arm : profile.arms) {
        json rows = json::array();
        for (const ProfileRow& row : arm.rows) rows.push_back(json_of(row));
        json one = {
            {"name", arm.name},
            {"recipe", arm.recipe},
            {"layer seconds", json_of(arm.whole.layer)},
            {"layer forward seconds", json_of(arm.whole.forward)},
            {"layer backward seconds", json_of(arm.whole.backward)},
            {"layer clock hertz", json_of(arm.whole.clock)},
            {"layer cycles", json_of(arm.whole.cycles)},
            {"passes seconds", json_of(arm.whole.passes)},
            {"layer seconds by step", arm.whole.layer_by_step},
            {"layer clock hertz by step", arm.whole.clock_by_step},
            {"step seconds", arm.step_seconds},
            {"step seconds by step", arm.seconds_by_step},
            {"host seconds", arm.host_seconds},
            {"host stops per step", arm.host_stops ? json(*arm.host_stops) : json()},
            {"joules per step", nullptr},
            {"joules per token", nullptr},
            {"passes joules per token", nullptr},
            {"step seconds per token of a gpu", arm.step_seconds_per_token(profile.ranks)},
            {"tokens per second per gpu", arm.tokens_per_second()},
            {"useful flops", arm.useful_flops},
            {"flops per second per gpu", arm.flops_per_second()},
            {"peak flops per second", profile.machine.bf16_flops},
            {"casts", arm.casts},
            {"wire bytes",
             {{"routing", arm.wire.routing}, {"dispatch", arm.wire.dispatch}, {"combine", arm.wire.combine}}},
            {"wire seconds", arm.wire_seconds},
            {"wire seconds alone", arm.wire_alone_seconds()},
            {"wait seconds", arm.waiting_seconds()},
            {"work seconds by rank", json::array()},
            {"wire seconds by rank", json::array()},
            {"wait seconds by rank", json::array()},
            {"slowest rank", nullptr},
            {"exposed wire seconds", nullptr},  // no longer measured; readers of 0.2.0 expect the key
            {"expert load max over mean", arm.expert_load},
            {"rank load max over mean", arm.rank_load},
            {"padding share", arm.padding_share},
            {"parts above ceiling", json::array()},
            {"saved bytes", arm.memory.saved},
            {"saved bytes reserved", arm.memory.saved_sums.reserved},
            {"saved bytes used", arm.memory.saved_sums.used},
            {"workspace bytes reserved", arm.memory.workspace.reserved},
            {"workspace bytes used", arm.memory.workspace.used},
            {"routed rows of a layer reserved", arm.memory.capacity.layer},
            {"routed rows of a layer used", arm.memory.most_wanted.layer},
            {"steps redone", arm.redone},
            {"parameter bytes", arm.memory.parameters},
            {"activation bytes", arm.memory.activations},
            {"rows", rows}};
        add_by_rank_and_part(arm, profile, one);
        result["recipes"].push_back(std::move(one));
    }
    return result;
}

}  // namespace fp8flow::profile
