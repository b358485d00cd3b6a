// SPDX-License-Identifier: MIT
// loss.svg of `train` and of `validate`, and the dots of an ablation of losses.
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/report/svg.h"
#include "model/validate/validate.h"

#include <optional>
#include <string>
#include <vector>

namespace fp8flow::report {

// What a run knows of itself.
struct RunTitle {
    std::string name;  // run_name
    const Config& config;
    const Provenance& provenance;
};

struct TrainLosses {
    Series train, held_out;            // over iterations, nats
    std::optional<double> floor = {};  // entropy of the source
    double tokens_per_second = 0;      // all ranks; 0: not known
};
std::string train_picture(const RunTitle& title, const TrainLosses& losses);
// Its curves: "train", then "held out" where there is one.
Panel train_panel(const TrainLosses& losses);

struct ValidateLosses {
    const std::vector<validate::Curve>& curves;            // the baseline first
    const std::vector<validate::Comparison>& comparisons;  // of the others
    std::optional<double> noise;                           // the control arm's largest error
    std::string verdict;
    std::string control_arm;  // its name
};
// Losses, and their signed differences with the limit and the noise floor as bands.
std::string validate_picture(const RunTitle& title, const ValidateLosses& losses);
// A dot an arm: its difference at the end, the line from the lowest to the highest after the warm-up.
std::string validate_dots(const RunTitle& title, const ValidateLosses& losses);

// Smoothed losses of all arms; of all but the baseline the difference to its own in percent, with the limit
// and the noise floor as bands.
struct ValidatePanels {
    Panel losses, differences;
};
ValidatePanels validate_panels(const Config& config, const ValidateLosses& losses);
// "0.063 %", and "(within the noise floor)" where another summation order moves the loss as far
std::string error_text(double error, std::optional<double> noise);
// "pass: fp8_flow within 0.063 % of bf16's loss, limit 0.25 %"
std::string verdict_text(const Config& config, const ValidateLosses& losses);

}  // namespace fp8flow::report
