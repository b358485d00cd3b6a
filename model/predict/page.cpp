// SPDX-License-Identifier: MIT
// report.html of `plan`.
#include "model/report/page/page.h"
#include "model/predict/choose.h"
#include "model/predict/picture.h"
#include "model/report/table.h"

namespace fp8flow::predict {

using namespace report;
using nlohmann::json;

std::string plan_page(const std::string& model, const std::vector<Choice>& choices, const Gpu& gpu,
                      const Provenance& provenance) {
    Page page(model + ": plan" + speed_up_of(choices, gpu), choices.front().config, provenance);
    page.fact("prediction", statement(gpu));
    page.fact("assumed", plan::assumptions_text(choices.front().config));
    std::vector<PageRows> times,
        memory = {{"",
                   {{gpu.sheet.gpu + ", usable",
                     {{"usable", (1 - kOutsideShare) * gpu.sheet.memory_bytes / 0x1p30}}}}}};
    for (const Choice& choice : choices) {
        if (!choice.best) continue;
        page.fact(label_of(choice),
                  fmt::format("step {}, {} tokens/s in all, {:.1f} GiB a GPU{}",
                              format_duration(choice.time.step), format_si(choice.time.tokens_per_second()),
                              choice.fit.needed / 0x1p30, choice.fit.fits() ? "" : ", which does not fit"));
        PageRows rows{label_of(choice), {{"step", {}}}};
        std::vector<std::pair<std::string, double>>& parts = rows.rows.front().parts;
        for (const StageTime& stage : choice.time.stages) {
            const std::string kind = kind_of(stage.work);
            auto found = std::find_if(parts.begin(), parts.end(),
                                      [&](const auto& part) { return part.first == kind; });
            if (found == parts.end()) found = parts.insert(parts.end(), {kind, 0.0});
            found->second += stage.seconds * stage.runs * 1e3;
        }
        times.push_back(std::move(rows));
        PageRow bytes{label_of(choice), {}};
        for (const auto& item : choice.fit.items)
            bytes.parts.emplace_back(item.category, item.bytes / 0x1p30);
        memory.front().rows.push_back(std::move(bytes));
    }
    page.absent("loss", "A plan trains nothing: `fp8flow train` and `validate` do.");
    page.set("stages", bars_json(times, "ms"),
             "Predicted milliseconds of a step by part; what a schedule hides is part of the bars.");
    page.absent("timeline", "`fp8flow profile` with this configuration measures it.");
    page.set("memory", bars_json(memory, "GiB"), "Predicted, of one GPU; the first bar is what it has.");
    page.absent("routing", "A plan takes the experts as evenly loaded.");
    return page.html();
}

}  // namespace fp8flow::predict
