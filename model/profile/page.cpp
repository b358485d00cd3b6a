// SPDX-License-Identifier: MIT
// report.html of `profile`: profile.json, and the answer as its title.
#include "model/report/page/page.h"
#include "model/profile/profile.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <fmt/format.h>

namespace fp8flow::profile {

using namespace report;

namespace {

using nlohmann::json;

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
        if (resolved(first.whole.layer, arm.whole.layer) && arm.whole.layer.median < best->whole.layer.median)
            best = &arm;
    if (best == &first) return title + ": none faster than " + first.name + " beyond the spread";
    return title +
           fmt::format(": {} {} as fast as {}", best->name, speed_up_text(profile, *best, " x"), first.name);
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
    for (const ArmProfile& arm : profile.arms)
        if (const auto slowest = slowest_of(arm.by_rank))
            page.fact(arm.name + ", slowest rank and how far over the median", slowest_text(*slowest));
    json result = profile_json(profile, config);
    page.set("configuration", result["config"]);
    result.erase("config");
    page.set("profile", std::move(result));
    return page.html();
}

}  // namespace fp8flow::profile
