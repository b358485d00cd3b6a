// SPDX-License-Identifier: MIT
// The list of keys with a changed rule, each with the value for the old rule.
#include "model/config/changed_rules.h"

#include "model/config/check.h"
#include "model/config/fields.h"

#include <fmt/format.h>

namespace fp8flow {

namespace {

struct ChangedRule {
    const char *key, *old_value;  // its value for the old rule
    const char* both_rules;       // both rules, for a warning; null: the run prints what it decides
    bool (*matters)(const Config&);
};
constexpr ChangedRule kChangedRules[] = {
    {"training.lr_warmup_style", "from_first_step",
     "step 1 has learning rate 0 and step lr_warmup_iters + 1 has lr, as in Megatron-LM; earlier versions "
     "had lr / lr_warmup_iters and lr in steps 1 and lr_warmup_iters, as from_first_step has",
     [](const Config& c) { return c.training.lr_warmup_iters > 0; }},
    {"moe.moe_global_aux_loss_gradient", "sum",
     "global_aux_loss on R ranks has the mean of their gradients, as in Megatron-LM; earlier versions had R "
     "times that, as sum has",
     [](const Config& c) { return c.moe.balances_by(BalancingLoss::global_aux_loss); }},
    {"precision.moe_wgrad_micro_batches", "1", nullptr,
     [](const Config& c) { return c.training.global_batch_size > c.training.micro_batch_size; }},
};

}  // namespace

std::vector<std::string> warnings_of_changed_rules(const Config& config) {
    std::vector<std::string> warnings;
    for (const ChangedRule& rule : kChangedRules)
        if (rule.both_rules != nullptr && rule.matters(config) && !config.origin.contains(rule.key))
            warnings.push_back(fmt::format("{} is not set: {}", rule.key, rule.both_rules));
    return warnings;
}

std::vector<std::string> keep_old_rules(Config& saved, Config& config) {
    std::vector<std::string> kept;
    for (const ChangedRule& rule : kChangedRules) {
        const ConfigField& field = field_named(rule.key);
        if (!saved.origin.contains(rule.key)) field.set(saved, {false, {rule.old_value}});
        const std::string then = field.get(saved);
        if (config.origin.contains(rule.key) || field.get(config) == then) continue;
        const std::string own = field.get(config);
        if (!set_if_legal(config, rule.key, then)) continue;
        // Of an undecided key nothing changes for the user.
        if (rule.matters(config) && own != "auto") kept.push_back(fmt::format("{}: {}", rule.key, then));
    }
    return kept;
}

}  // namespace fp8flow
