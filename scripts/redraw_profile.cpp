// SPDX-License-Identifier: MIT
// Draws profile.svg of a profile.json again: the pictures of docs/results follow the program's.
// Build: cmake --build build/PRESET --target redraw_profile
// Run:   build/PRESET/redraw_profile docs/results/profile_mixtral_8x7b.json layer_mixtral_8x7b > .../profile_mixtral_8x7b.svg
#include "model/config/config.h"
#include "model/profile/profile.h"
#include "model/report/titles.h"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <fstream>

using namespace fp8flow;
using nlohmann::json;

namespace {

report::Spread spread_of(const json& value, int64_t steps) {
    return {value.at("median"), value.at("min"), value.at("max"), steps};
}

profile::Profile read(const json& file) {
    profile::Profile result;
    result.ranks = file.at("ranks");
    result.routing = file.at("routing");
    result.machine.device = file.at("machine").at("device");
    result.ablation = file.contains("noise floor");
    const bool host = result.machine.device.find("NVIDIA") == std::string::npos;
    result.provenance.ranks = result.ranks;
    result.provenance.gpus = host ? 0 : result.ranks;
    result.provenance.date = file.at("date");
    const int64_t steps = file.at("steps");
    for (const json& recipe : file.at("recipes")) {
        profile::ArmProfile arm;
        arm.name = recipe.at("name");
        arm.whole.layer = spread_of(recipe.at("layer seconds"), steps);
        arm.whole.forward = spread_of(recipe.at("layer forward seconds"), steps);
        arm.whole.backward = spread_of(recipe.at("layer backward seconds"), steps);
        arm.tokens = recipe.at("tokens per second per gpu").get<double>() * arm.whole.layer.median;
        for (const json& row : recipe.at("rows"))
            arm.rows.push_back({.part = row.at("part"),
                                .stage = row.at("stage"),
                                .direction = row.at("direction"),
                                .seconds = spread_of(row.at("seconds"), steps)});
        result.arms.push_back(std::move(arm));
    }
    return result;
}

}  // namespace

int main(int count, char** arguments) try {
    if (count != 3) {
        std::fprintf(stderr, "usage: redraw_profile profile.json NAME > profile.svg\n");
        return 2;
    }
    std::ifstream in(arguments[1]);
    const json file = json::parse(in);
    profile::Profile profile = read(file);
    profile.model = arguments[2];
    try {
        std::string config = file.at("config");
        const std::string old_key = "moe_delay_wgrad_compute";  // renamed since
        if (const size_t at = config.find(old_key); at != std::string::npos)
            config.replace(at, old_key.size(), "moe_wgrad_pair_micro_batches");
        profile.shape = report::model_shape(parse_config(config, arguments[1]));
    } catch (const std::exception& problem) {  // keys of an older program: the picture goes without
        std::fprintf(stderr, "%s: no shape: %s\n", arguments[1], problem.what());
    }
    std::fputs(profile::profile_picture(profile).c_str(), stdout);
    return 0;
} catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
}
