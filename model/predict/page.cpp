// SPDX-License-Identifier: MIT
// report.html of `plan`: the best choices, as choices_json has them.
#include "model/report/page/page.h"
#include "model/predict/choose.h"
#include "model/report/plan_report.h"
#include "model/report/run_report.h"
#include "model/report/table.h"

#include <fmt/format.h>

namespace fp8flow::predict {

using namespace report;

namespace {

// ", fp8_flow on 64 GPUs: 1.31 x as fast as bf16" for the largest number of GPUs that has both recipes, or
// that the difference is within the error of the prediction.
std::string speed_up_of(const std::vector<Choice>& choices, const Gpu& gpu) {
    const auto& check = gpu.calibration.check;
    std::string text;
    int64_t most = 0;
    for (const Choice& base : choices)
        for (const Choice& other : choices) {
            const Recipe recipe = other.config.precision.recipe;
            if (!base.fastest_that_fits() || !other.fastest_that_fits() || base.gpus != other.gpus ||
                base.gpus < most)
                continue;
            if (base.config.precision.recipe != Recipe::bf16 || recipe == Recipe::bf16) continue;
            most = base.gpus;
            const double ratio = other.time.tokens_per_second() / base.time.tokens_per_second();
            text = fmt::format(", {} on {}: ", recipe_name(recipe), counted(base.gpus, "GPU")) +
                   (gpu.calibrated && check && resolved(ratio - 1, check->mean_step)
                        ? fmt::format("{:.2f} x as fast as bf16", ratio)
                        : std::string("against bf16 within the error of the prediction"));
        }
    return text;
}

}  // namespace

std::string plan_page(const std::string& model, std::vector<Choice> choices, const Gpu& gpu,
                      const Provenance& provenance) {
    const Config config = choices.front().config;
    Page page(fmt::format("{}, predicted for the {}{}", model, gpu.sheet.gpu, speed_up_of(choices, gpu)),
              model_shape(config), provenance);
    page.fact("prediction", statement(gpu));
    page.fact("assumed", assumptions_text(config));
    std::erase_if(choices, [](const Choice& choice) { return !choice.best; });
    for (const Choice& choice : choices)
        page.fact(fmt::format("{} GPUs, {}, EP {}", choice.gpus, recipe_name(choice.config.precision.recipe),
                              choice.config.parallel.expert_model_parallel_size),
                  fmt::format("step {}, {:.1f} GiB per GPU{}",
                              choice.time.extrapolated()
                                  ? fmt::format("{} to {}, extrapolation", format_duration(choice.time.least),
                                                format_duration(choice.time.most))
                                  : fmt::format("{}, {} tokens/s in all", format_duration(choice.time.step),
                                                format_si(choice.time.tokens_per_second())),
                              choice.fit.needed / 0x1p30, choice.fit.fits() ? "" : ", which does not fit"));
    page.set("plan", choices_json(choices, gpu, provenance));
    page.set("configuration", dump_config(config));
    return page.html();
}

}  // namespace fp8flow::predict
