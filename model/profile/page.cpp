// SPDX-License-Identifier: MIT
// report.html of `profile`: profile.json, the answer as its title, and the CUDA streams of one MoE layer.
#include "model/report/page/page.h"
#include "model/profile/profile.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fp8flow::profile {

using namespace report;

namespace {

using nlohmann::json;

// From top to bottom. The second of two micro-batches on the main stream has its own row.
constexpr std::array kStreamNames = {"main stream", "other micro-batch", "side stream", "wire stream"};
static_assert(kStreamNames.size() == kNumStreamRoles + 1);
const char* name_of_stream(const StageSpan& span) {
    if (span.role == StreamRole::main) return kStreamNames[span.turn > 0 ? 1 : 0];
    return kStreamNames[1 + static_cast<size_t>(span.role)];
}

double speed_up(const Profile& profile, const ArmProfile& arm) {
    const double own = arm.whole.layer.median;
    return own > 0 ? profile.arms.front().whole.layer.median / own : 0;
}

// "layer_mixtral_8x7b, one MoE layer on 4 GPUs: fp8_flow 1.42 x as fast as bf16"
std::string title_of(const Profile& profile) {
    std::string title =
        (profile.model.empty() ? "" : profile.model + ", ") + "one MoE layer on " +
        (profile.provenance.ranks > 0 && !profile.provenance.date.empty() ? device_count(profile.provenance)
                                                                          : counted(profile.ranks, "rank"));
    if (profile.arms.size() < 2) return title;
    if (profile.ablation) return title + ", without one optimisation at a time";
    const ArmProfile &first = profile.arms.front(), *best = &first;
    for (const ArmProfile& arm : profile.arms)
        if (resolved(first.whole.layer, arm.whole.layer) && speed_up(profile, arm) > speed_up(profile, *best))
            best = &arm;
    if (best == &first) return title + ": none faster than " + first.name + " beyond the spread";
    return title +
           fmt::format(": {} {} as fast as {}", best->name, speed_up_text(profile, *best, " x"), first.name);
}

// The middle micro-batch of the first MoE layer in one direction, and everything that ran meanwhile.
json window_of(const std::vector<StageSpan>& trace, std::string_view direction) {
    json window = {{"direction", direction}, {"seconds", 0}, {"boxes", json::array()}};
    std::vector<const StageSpan*> ways;
    for (const StageSpan& span : trace)
        if (span.level == StageLevel::part && std::string_view(span.name) == kMoeLayer &&
            span.direction == direction && (ways.empty() || ways.front()->layer == span.layer))
            ways.push_back(&span);
    if (ways.empty()) return window;
    const StageSpan& way = *ways[ways.size() / 2];
    window["seconds"] = way.seconds;
    for (size_t i = 0; i < trace.size(); ++i) {
        const StageSpan& span = trace[i];
        const std::string stage = stage_of(trace, static_cast<int>(i)).stage;
        const bool inner =
            span.parent >= 0 && trace[static_cast<size_t>(span.parent)].level == StageLevel::stage;
        if (span.level != StageLevel::stage || (inner && stage != "cast")) continue;
        const double begin = std::max(span.begin - way.begin, 0.0);
        const double end = std::min(span.begin + span.seconds - way.begin, way.seconds);
        if (end > begin)
            window["boxes"].push_back({{"lane", name_of_stream(span)},
                                       {"stage", stage},
                                       {"begin", begin},
                                       {"end", end},
                                       {"tooltip", fmt::format("{}, {}, {:.3f} ms", span.name, span.direction,
                                                               span.seconds * 1e3)}});
    }
    return window;
}

}  // namespace

std::string speed_up_text(const Profile& profile, const ArmProfile& arm, std::string_view unit) {
    const ArmProfile& first = profile.arms.front();
    return &arm == &first ? fmt::format("1.00{}", unit)
                          : ratio_text(first.whole.layer, arm.whole.layer, unit);
}

std::string profile_page(const Profile& profile, const Config& config) {
    Page page(title_of(profile), (profile.shape.empty() ? "" : profile.shape + "; ") + profile.machine.device,
              profile.provenance);
    page.fact("routing", profile.routing);
    page.fact(std::string(kNotResolved), std::string(kResolvedRule));
    json timeline = {{"lanes", kStreamNames}, {"arms", json::array()}};
    for (const ArmProfile& arm : profile.arms) {
        timeline["arms"].push_back(
            {{"name", arm.name},
             {"windows", {window_of(arm.trace, "forward"), window_of(arm.trace, "backward")}}});
        if (const auto slowest = slowest_of(arm.by_rank))
            page.fact(arm.name + ", slowest rank and how far over the median", slowest_text(*slowest));
    }
    json result = profile_json(profile, config);
    page.set("configuration", result["config"]);
    result.erase("config");
    page.set("profile", std::move(result));
    page.set("timeline", std::move(timeline));
    return page.html();
}

}  // namespace fp8flow::profile
