// SPDX-License-Identifier: MIT
// YAML text and `--set` overrides to a Config. Problems are collected, never thrown one by one, so that a
// user sees all of them at once.
#include "model/config/builders.h"
#include "model/config/changed_rules.h"
#include "model/config/check.h"
#include "model/config/fields.h"
#include "model/config/hf_config.h"
#include "model/config/layer_pattern.h"
#include "model/safetensors/input.h"

#include "kernels/core/error.h"
#include "layers/flows/flow.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

namespace fp8flow {
namespace {

constexpr size_t kMaxYamlBytes = 64 * 1024;

// Takes what a parser finds, and keeps nothing.
class NoEvents : public YAML::EventHandler {
    using Style = YAML::EmitterStyle::value;
    void OnDocumentStart(const YAML::Mark&) override {}
    void OnDocumentEnd() override {}
    void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
    void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
    void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
    void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, Style) override {}
    void OnSequenceEnd() override {}
    void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, Style) override {}
    void OnMapEnd() override {}
};

// At most one. YAML::LoadAll finds documents without end in some texts, and takes all memory for them.
bool has_one_document(const std::string& text) {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    NoEvents events;
    return !parser.HandleNextDocument(events) || !parser.HandleNextDocument(events);
}

// Why this is no text; empty if it is. yaml-cpp takes byte 4 for the end of the file.
std::string no_text(std::string_view bytes) {
    if (bytes.size() > kMaxYamlBytes)
        return fmt::format("got {} bytes, want at most {}", bytes.size(), kMaxYamlBytes);
    const auto is_control = [](unsigned char c) {
        return (c < 0x20 && c != '\t' && c != '\n' && c != '\r') || c == 0x7F;
    };
    if (std::ranges::any_of(bytes, is_control)) return "got control characters, want text";
    try {
        static_cast<void>(nlohmann::json(bytes).dump());
    } catch (const nlohmann::json::type_error&) {
        return "got bytes that are no UTF-8, want text";
    }
    return "";
}

class Reader {
public:
    Reader(Config& config, ConfigProblems& problems) : config_(config), problems_(problems) {}

    void read_document(std::string_view text, const std::string& name) {
        refuse_lfs_pointer(text, name, ExitCode::usage);
        const auto root = load(text, name);
        if (!root) return;
        if (!root->IsMap() || root->size() == 0)
            return problems_.add(place(name, root->Mark()), "got no settings, want sections {}", sections());
        if (is_arguments(*root)) return read_arguments(*root, name);
        const YAML::Node model = std::as_const(*root)["model"];
        const YAML::Node yields =
            model && model.IsMap() ? std::as_const(model)["yields_to_hf_config"] : model;
        yields_ = yields && yields.IsScalar() && builders::read_truth(yields.Scalar()).value_or(false);
        std::set<std::string> seen;
        for (const auto& entry : *root) {
            const std::string where = place(name, entry.first.Mark());
            if (!entry.first.IsScalar())
                problems_.add(where, "got a key that is no text, want key: value");
            else if (!seen.insert(entry.first.Scalar()).second)
                problems_.add(where, "{}: got this section twice, want it once",
                              printable(entry.first.Scalar()));
            else
                read_section(entry.first.Scalar(), entry.second, where, name);
        }
    }

    void read_setting(const ConfigSetting& setting) {
        if (const auto value = load(setting.value, setting.where))
            read_field(field_named(setting.key), *value, setting.where);
        imported_.insert(setting.key);
    }

    // `section.key=value`, or `key=value`: leaf keys are unique.
    void read_override(const std::string& text) {
        const std::string where = "--set";
        const size_t equals = text.find('=');
        if (equals == std::string::npos || equals == 0)
            return problems_.add(where, "got {}, want section.key=value", printable(text));
        const std::string name = text.substr(0, equals);
        const size_t dot = name.find('.');
        const std::string section = dot == std::string::npos ? "" : name.substr(0, dot),
                          key = name.substr(dot + 1);
        std::string value = text.substr(equals + 1);
        const ConfigField* field = dot == std::string::npos ? find_leaf(key) : find_field(section, key);
        if (!field) return read_other(section, key, value, where, where);
        // Text is taken as it is, with blanks, # and quotes, unless it begins as YAML's quotes or a list do.
        if (field->is_text && !value.empty() && value.find_first_of("\"'[") != 0)
            value = builders::quoted(value);
        if (const auto node = load(value, where + " " + field->name())) read_field(*field, *node, where);
    }

private:
    static std::string place(const std::string& name, const YAML::Mark& mark) {
        return mark.is_null() ? name : fmt::format("{}:{}:{}", name, mark.line + 1, mark.column + 1);
    }

    static std::string sections() { return fmt::format("{}", fmt::join(config_sections(), ", ")); }

    std::optional<YAML::Node> load(std::string_view text, const std::string& name) {
        if (const std::string problem = no_text(text); !problem.empty()) {
            problems_.add(name, "{}", problem);
            return std::nullopt;
        }
        // yaml-cpp takes a tab in front of nothing, or of a comment, for indentation.
        std::string plain(text);
        bool leads = true;
        for (char& c : plain) {
            if (leads && c == '\t') c = ' ';
            leads = c == '\n' || (leads && c == ' ');
        }
        try {
            if (has_one_document(plain)) return YAML::Load(plain);
            problems_.add(name, "got several YAML documents, want one");
            return std::nullopt;
        } catch (const YAML::Exception& error) {
            problems_.add(place(name, error.mark), "got text that is no YAML ({}), want key: value",
                          error.msg);
            return std::nullopt;
        }
    }

    static std::string unknown_key(const std::string& section, const std::string& key) {
        const std::string name = printable(section.empty() ? key : section + "." + key);
        if (const ConfigField* field = find_leaf(key))
            return fmt::format("{}: got a key of another section, want {}", name, field->name());
        const std::string hint = explain_unknown_key(key);
        return fmt::format("{}: got an unknown key, want one of --help-config{}{}", name,
                           hint.empty() ? "" : "; ", hint);
    }

    // A file of Megatron-LM's arguments: values without sections, and a name that is known.
    static bool is_arguments(const YAML::Node& root) {
        bool known = false;
        for (const auto& entry : root) {
            if (!entry.first.IsScalar() || entry.second.IsMap() || entry.second.IsNull()) return false;
            known = known || find_leaf(argument_name(entry.first));
        }
        return known;
    }

    static std::string argument_name(const YAML::Node& node) {
        std::string name = node.Scalar();
        std::ranges::replace(name, '-', '_');
        return name;
    }

    void read_arguments(const YAML::Node& root, const std::string& name) {
        std::set<std::string> seen;
        for (const auto& entry : root) {
            const std::string key = argument_name(entry.first), where = place(name, entry.first.Mark()),
                              value = entry.second.IsScalar() ? entry.second.Scalar() : "";
            if (!seen.insert(key).second)
                problems_.add(where, "{}: got this argument twice, want it once", printable(key));
            const auto other = megatron_setting(key, value);
            const ConfigField* field = find_leaf(other ? other->key : key);
            // fp8_recipe comes before bf16
            const bool weaker = key == "bf16" && config_.origin.contains("precision.recipe");
            if (weaker || (other && other->key.empty())) continue;
            if (field)
                read_field(*field, other ? YAML::Node(other->value) : entry.second, where);
            else
                read_other("", key, value, where, where);
        }
    }

    // A key that the table does not have: one that holds no setting, or an unknown one.
    void read_other(const std::string& section, const std::string& key, const std::string& value,
                    const std::string& where, const std::string& key_place) {
        const auto known = key_without_setting(section, key, value);
        if (!known)
            problems_.add(key_place, "{}", unknown_key(section, key));
        else if (!known->ignored)
            problems_.add(where, "{}", known->text);
        else if (!known->text.empty())
            config_.warnings.push_back(fmt::format("{}: {}", where, known->text));
    }

    void read_section(const std::string& section, const YAML::Node& node, const std::string& where,
                      const std::string& name) {
        const auto& known = config_sections();
        if (std::ranges::find(known, section) == known.end()) {
            const std::string nearest = nearest_name(section, known);
            if (nearest.empty() && (find_leaf(section) || !explain_unknown_key(section).empty()))
                return problems_.add(where, "{}", unknown_key("", section));
            return problems_.add(where, "{}: got an unknown section, want one of {}{}", printable(section),
                                 sections(),
                                 nearest.empty() ? "" : fmt::format("; did you mean '{}'", nearest));
        }
        if (node.IsNull()) return;
        if (!node.IsMap())
            return problems_.add(where, "{}: got {}, want key: value lines below it", section,
                                 describe(node));
        std::set<std::string> seen;
        for (const auto& entry : node) {
            const std::string key_place = place(name, entry.first.Mark());
            if (!entry.first.IsScalar()) {
                problems_.add(key_place, "{}: got a key that is no text, want key: value", section);
                continue;
            }
            const std::string key = entry.first.Scalar();
            const ConfigField* field = find_field(section, key);
            if (!seen.insert(key).second) {
                problems_.add(key_place, "{}.{}: got this key twice, want it once", section, printable(key));
                continue;
            }
            const bool has_place = !entry.second.Mark().is_null() && !entry.second.IsNull();
            const std::string value_place = has_place ? place(name, entry.second.Mark()) : key_place;
            if (field && yields_ && imported_.contains(field->name())) continue;
            if (field)
                read_field(*field, entry.second, value_place);
            else
                read_other(section, key, entry.second.IsScalar() ? entry.second.Scalar() : "", value_place,
                           key_place);
        }
    }

    static std::string describe(const YAML::Node& node) {
        if (node.IsNull()) return "nothing";
        if (node.IsScalar()) return node.Scalar().empty() ? "empty text" : printable(node.Scalar());
        return node.IsMap() ? "a map" : "a list";
    }

    void read_field(const ConfigField& field, const YAML::Node& node, const std::string& where) {
        std::optional<Refusal> refusal;
        std::string got = describe(node);
        const bool null = node.IsNull() && !field.null.empty();
        if (const auto value = null ? WrittenValue{false, {field.null}} : written(node)) {
            refusal = field.set(config_, *value);
            if (value->is_list) got = printable(value->text());
            if (!refusal) config_.origin[field.name()] = where;
        } else {
            refusal = Refusal{field.type, ""};
        }
        if (!refusal) return;
        problems_.add(where, "{}: got {}, want {}", field.name(), got, refusal->text());
        problems_.mark_bad(field.name());
    }

    // A scalar or a list of scalars; nothing for null, maps and lists of lists.
    static std::optional<WrittenValue> written(const YAML::Node& node) {
        if (node.IsScalar()) return WrittenValue{false, {node.Scalar()}};
        if (!node.IsSequence()) return std::nullopt;
        WrittenValue value{true, {}};
        for (const auto& item : node) {
            if (!item.IsScalar()) return std::nullopt;
            value.items.push_back(item.Scalar());
        }
        return value;
    }

    Config& config_;
    ConfigProblems& problems_;
    std::set<std::string> imported_;  // keys of an imported model
    bool yields_ = false;             // the document's values of them are not taken
};

// Keys, or how they begin, that change nothing without a value of another key.
struct IdleKey {
    const char *key, *wanted;
    bool (*is_idle)(const Config&);
};
constexpr IdleKey kIdleKeys[] = {
    {"training.lr_wsd_", "lr_decay_style: WSD",
     [](const Config& c) { return c.training.lr_decay_style != LrDecayStyle::wsd; }},
    {"training.lr_warmup_init", "lr_warmup_iters",
     [](const Config& c) { return c.training.lr_warmup_iters == 0; }},
    {"training.freeze_keeps_moments", "freeze",
     [](const Config& c) { return c.training.freeze.names.empty(); }},
    {"moe.moe_router_bias_update_rate", "moe_router_enable_expert_bias: true",
     [](const Config& c) { return !c.moe.moe_router_enable_expert_bias; }},
    {"output.tensor_stats_interval", "tensor_stats: true",
     [](const Config& c) { return !c.output.tensor_stats; }},
    {"output.tensorboard_log_interval", "tensorboard_dir",
     [](const Config& c) { return c.output.tensorboard_dir.empty(); }},
    {"output.moe_per_layer_logging", "tensorboard_dir",
     [](const Config& c) { return c.output.tensorboard_dir.empty(); }},
    {"data.max_bytes", "data_kind: text", [](const Config& c) { return c.data.data_kind != DataKind::text; }},
    {"data.file_extensions", "data_kind: text",
     [](const Config& c) { return c.data.data_kind != DataKind::text; }},
    {"data.synthetic_", "data_kind: synthetic",
     [](const Config& c) { return c.data.data_kind != DataKind::synthetic; }},
};

// Of --set; a file may have them for another run.
void warn_of_idle_keys(Config& config) {
    for (const auto& [key, where] : config.origin)
        for (const IdleKey& idle : kIdleKeys)
            if (where == "--set" && key.starts_with(idle.key) && idle.is_idle(config))
                config.warnings.push_back(fmt::format("{} has no effect without {}", key, idle.wanted));
}

// `--set precision.flow=''` means none, though a plugin has some.
bool leaves_flow_open(const Config& config) {
    const auto set = config.origin.find("precision.flow");
    return config.precision.flow.empty() && (set == config.origin.end() || set->second != "--set");
}

}  // namespace

Config parse_config(std::string_view text, const std::string& name, const std::vector<std::string>& overrides,
                    std::optional<int64_t> world_size, const ImportedModel& first) {
    Config config;
    ConfigProblems problems;
    Reader reader(config, problems);
    for (const ConfigSetting& setting : first.settings) reader.read_setting(setting);
    const Config theirs = config;
    reader.read_document(text, name);
    for (const auto& override_text : overrides) reader.read_override(override_text);
    const auto set_by_user = [&](const std::string& key) {
        const auto before = theirs.origin.find(key);
        const auto now = config.origin.find(key);
        return now != config.origin.end() && (before == theirs.origin.end() || now->second != before->second);
    };
    if (!first.foreign.empty() && !set_by_user("model.attention")) {
        config.foreign = fmt::format("{}: {}", first.name, first.foreign);
        config.warnings.push_back(config.foreign + ", which is not implemented and left out");
    }
    config.imported = first.name;
    config.folds = first.folds;
    if (!set_by_user("model.rope_type")) config.unscaled_length = first.unscaled_length;
    if (!first.name.empty()) config.model.yields_to_hf_config = false;  // it is decided: config.yaml has all
    // A user who sets the losses sets their coefficients too.
    if (set_by_user("moe.moe_router_load_balancing_type") && !set_by_user("moe.moe_aux_loss_coeff") &&
        !first.name.empty())
        config.moe.moe_aux_loss_coeff.clear();
    for (const ImportedModel::Note& note : first.notes)
        if (!set_by_user(note.key)) config.warnings.push_back(note.text);
    warn_of_idle_keys(config);
    resolve_config(config);
    if (const auto own = registered_flows(); own.size() > 1 && leaves_flow_open(config))
        problems.add("--plugin", "got {}, want one of them in --set precision.flow=NAME",
                     fmt::join(own, ", "));
    std::vector<std::string> changed;  // of the imported model
    bool in_file = false;
    for (const ConfigSetting& setting : first.settings) {
        const ConfigField& field = field_named(setting.key);
        if (!set_by_user(setting.key)) {
            problems.mark_imported(setting.key);
        } else if (const std::string now = field.get(config), before = field.get(theirs);
                   now != before && changes_the_model(setting.key)) {
            changed.push_back(
                fmt::format("{} {} ({} there)", setting.key, printable(now, 40), printable(before, 40)));
            in_file = in_file || config.origin[setting.key].starts_with(name);
        }
    }
    const std::string change = fmt::format("{} comes after {} and changes its model: {}", name, first.name,
                                           fmt::join(changed, ", "));
    if (in_file) config.warnings.push_back(change);
    collect_config_problems(config, world_size, problems);
    if (in_file && !problems.empty()) problems.add(change, "remove these keys to take the model as it is");
    problems.throw_if_any();
    return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides,
                   std::optional<int64_t> world_size, const std::string& hf_config) {
    const auto first = hf_config.empty() ? ImportedModel{} : read_hf_config(hf_config);
    if (path.empty() && !hf_config.empty())
        return parse_config("model:\n", hf_config, overrides, world_size, first);
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    require(!error && std::filesystem::exists(status), ExitCode::usage,
            "{}: got no such file, want a configuration (see configs/)", path);
    require(std::filesystem::is_regular_file(status), ExitCode::usage,
            "{}: got something other than a file, want a configuration (see configs/)", path);
    const std::string text = InputFile(path, ExitCode::usage).text(kMaxYamlBytes);
    return parse_config(text, path, overrides, world_size, first);
}

void resolve_config(Config& config) {
    auto layers = expand_layer_pattern(config.moe_layer_freq, config.model.num_layers);
    FP8FLOW_CHECK(layers.has_value(), "moe_layer_freq {}", config.moe_layer_freq);
    config.model.moe_layer_freq = std::move(*layers);
    config.model.padded_vocab_size =
        round_up(config.model.vocab_size, config.model.make_vocab_size_divisible_by);
    PrecisionSpec& precision = config.precision;
    const auto own = registered_flows();
    if (own.size() == 1 && leaves_flow_open(config)) precision.flow = own.front();
    if (const auto base = base_of_flow(precision.flow); base && *base != precision.recipe) {
        if (config.origin.contains("precision.recipe"))
            config.warnings.push_back(
                fmt::format("precision.flow is {}, so precision.recipe is {} and not {}", precision.flow,
                            recipe_name(*base), recipe_name(precision.recipe)));
        precision.recipe = *base;
    }
    TrainingSpec& training = config.training;
    // A run that ends before lr_decay_iters is the first part of a longer one, and has its learning rates.
    const int64_t longest = std::max(training.train_iters, training.lr_decay_iters);
    if (training.lr_warmup_iters > longest) {
        config.warnings.push_back(
            fmt::format("training.lr_warmup_iters is {}, and the run has {} iteration{}: warm-up takes {}",
                        training.lr_warmup_iters, longest, longest == 1 ? "" : "s", longest));
        training.lr_warmup_iters = longest;
    }
    for (std::string& warning : warnings_of_changed_rules(config))
        config.warnings.push_back(std::move(warning));
}

}  // namespace fp8flow
