// SPDX-License-Identifier: MIT
// Writing, reading and comparing the files of jobs.
#include "model/validate/run_file.h"

#include "kernels/core/error.h"
#include "kernels/core/random.h"
#include "model/config/fields.h"
#include "model/safetensors/input.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <tuple>

namespace fp8flow::validate {

using nlohmann::json;

namespace {

// Sections and keys that say where and how a run is written or judged, not what it computes.
bool is_compared(const ConfigField& field) {
    if (field.key == "pretrained_checkpoint") return true;
    for (const char* section : {"output", "checkpoint", "validate", "profile"})
        if (field.section == section) return false;
    // data are compared by content; the seed is the job's
    return field.key != "data_path" && field.key != "seed" && field.key != "peer_deadline_seconds";
}

double number(const json& value) {
    return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::vector<double> numbers(const json& values) {
    std::vector<double> result;
    for (const json& value : values) result.push_back(number(value));
    return result;
}

// A key that a run's program did not have yet counts as its default.
json with_new_keys(json configuration) {
    for (const ConfigField& field : config_fields())
        if (is_compared(field) && !configuration.contains(field.name()))
            configuration[field.name()] = field.get(Config{});
    return configuration;
}

// Earlier versions wrote the fingerprint of the data there.
bool has_order(const RunFile& file) {
    return file.content.contains("order") && file.content.at("order") != file.content.value("data", json());
}

void check_item(const RunFile& first, const RunFile& file, const std::string& item,
                const std::vector<std::string>& equal_commits) {
    if (!first.content.contains(item) || !file.content.contains(item)) return;
    json there = first.content.at(item), here = file.content.at(item);
    if (item == "configuration") there = with_new_keys(there), here = with_new_keys(here);
    if (there == here || (item == "order" && !(has_order(first) && has_order(file)))) return;
    const auto is_equal = [&](const json& commit) {
        return std::ranges::any_of(equal_commits,
                                   [&](const std::string& name) { return commit == json(name); });
    };
    std::string advice = "compare runs of one program on the same data, with the same configuration";
    if (item == "plugin") advice = "give the arm another name if its library computes something else now";
    if (item == "commit" || item == "plugin") {
        if (is_equal(there) && is_equal(here)) return;
        advice += fmt::format("; if what runs compute is the same in both, add --equal-commits {},{}",
                              there.get<std::string>(), here.get<std::string>());
    }
    std::string name = item, then = there.dump(), now = here.dump();
    if (there.is_object()) {
        json all = there;
        all.update(here);
        for (const auto& [key, value] : all.items()) {
            then = there.value(key, "nothing"), now = here.value(key, "nothing");
            name = key;
            if (then != now) break;
        }
    }
    fail(ExitCode::usage, "the runs differ in {}: {} has {}, {} has {}; {}", name, first.path, then,
         file.path, now, advice);
}

// Whether it can be compared with others, be its run done or not.
bool is_run_file(const json& content) {
    if (!content.is_object()) return false;
    const auto of = [&](const char* item) { return content.value(item, json()); };
    const auto is_text = [](const json& value) { return value.is_string(); };
    return is_text(of("arm")) && is_text(of("commit")) && (of("plugin").is_null() || is_text(of("plugin"))) &&
           of("seed").is_number_integer() && of("number").is_number_integer() &&
           std::ranges::all_of(std::array{of("keys"), of("configuration")}, [&](const json& texts) {
               return texts.is_object() && std::ranges::all_of(texts, is_text);
           });
}

// Throws Error(data) unless a report can be made of this run.
void check_done(const RunFile& file) {
    std::string problem;
    try {
        const json& content = file.content;
        for (const char* item :
             {"backend", "ranks", "data", "routing of", "order", "initial weights", "routing"})
            content.at(item);
        content.at("against").get<std::string>();
        as_trained({}, content);
        const Curve curve = run_of(content).curve;
        const std::string steps = content.at("configuration").at("training.train_iters");
        if (content.contains(kChecksum) && content.at(kChecksum) != checksum_of(content))
            problem = "its losses are not those of the training";
        if (curve.grad_norm.size() != curve.loss.size() ||
            (content.at("diverged") == false && std::to_string(curve.loss.size()) != steps))
            problem = fmt::format("{} losses and {} gradient norms of {} iterations", curve.loss.size(),
                                  curve.grad_norm.size(), steps);
        if (!std::ranges::all_of(curve.loss, [](double loss) { return std::isfinite(loss); }))
            problem = "a loss is not a number";
    } catch (const json::exception& error) {
        problem = error.what();
    }
    require(problem.empty(), ExitCode::data, "{}: {}; remove this file to run this arm again", file.path,
            problem);
}

}  // namespace

std::string file_name_of(const std::string& arm) {
    std::string name = arm;
    for (char& c : name)
        if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '=' && c != '+') c = '_';
    if (name.starts_with('.')) name[0] = '_';
    return name;
}

std::string job_name(const std::string& arm, int64_t seed) {
    return fmt::format("{}-{}", file_name_of(arm), seed);
}

json compared_keys(const Config& config) {
    json keys = json::object();
    Config named = config;  // a model has the same name on another machine, if not the same folder
    std::string& model = named.checkpoint.pretrained_checkpoint;
    model = (std::filesystem::path(model) / "").parent_path().filename();
    for (const ConfigField& field : config_fields())
        if (is_compared(field)) keys[field.name()] = field.get(named);
    return keys;
}

void check_agree(const std::vector<RunFile>& files, const std::vector<std::string>& equal_commits) {
    const auto check = [&](const RunFile& file, const char* same, std::initializer_list<const char*> items) {
        const auto first = std::ranges::find_if(files, [&](const RunFile& other) {
            return same == nullptr || other.content.at(same) == file.content.at(same);
        });
        for (const char* item : items) check_item(*first, file, item, equal_commits);
    };
    for (const RunFile& file : files) {
        check(file, nullptr, {"commit", "backend", "ranks", "data", "routing of", "configuration"});
        check(file, "seed", {"order", "initial weights"});
        check(file, "arm", {"keys", "against", "validate.control_arm", "plugin"});
        const auto same_folder = std::ranges::find_if(files, [&](const RunFile& other) {
            return file_name_of(other.arm()) == file_name_of(file.arm());
        });
        require(same_folder->arm() == file.arm(), ExitCode::usage,
                "{} and {} are runs of the arms {} and {}, which have the same folder; give one another name",
                same_folder->path, file.path, same_folder->arm(), file.arm());
        if (!has_order(file)) continue;
        const auto same_run = std::ranges::find_if(files, [&](const RunFile& other) {
            return std::ranges::all_of(std::array{"arm", "order", "initial weights"}, [&](const char* item) {
                return other.content.value(item, json()) == file.content.at(item);
            });
        });
        require(same_run->seed() == file.seed(), ExitCode::usage,
                "{} and {} begin with the same weights and data: with this configuration a seed changes "
                "nothing, so more seeds are no more runs; use one",
                same_run->path, file.path);
    }
}

json shortened(json values) {
    if (values.is_structured())
        for (json& value : values) value = shortened(std::move(value));
    else if (values.is_number_float())
        values = std::stod(fmt::format("{}", values.get<float>()));
    return values;
}

std::string checksum_of(const json& file) {
    std::string results;
    for (const char* item : {"diverged", "lm_loss", "grad_norm", "held out"}) results += file.at(item).dump();
    return checksum_text(fnv1a64(results));
}

std::vector<RunFile> read_run_files(const std::string& folder) {
    constexpr int64_t kMostBytes = int64_t{1} << 28;
    std::vector<RunFile> files;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder + "/" + kRuns, error)) {
        const std::string path = (entry.path() / kRunFile).string();
        if (!std::filesystem::exists(path, error)) continue;
        json content = json::parse(InputFile(path, ExitCode::data).text(kMostBytes), nullptr, false);
        require(is_run_file(content), ExitCode::data,
                "{}: not the file of a run of validate; remove it to run this arm again", path);
        files.push_back({std::move(content), path});
        if (files.back().is_done()) check_done(files.back());
    }
    sort_run_files(files);
    return files;
}

void sort_run_files(std::vector<RunFile>& files) {
    // processes with other arms on their command lines may have numbered one arm differently
    std::map<std::string, int64_t> numbers;
    for (const RunFile& file : files) {
        const int64_t number = file.content.at("number");
        int64_t& least = numbers.emplace(file.arm(), number).first->second;
        least = std::min(least, number);
    }
    std::ranges::sort(files, {}, [&](const RunFile& file) {
        return std::tuple(numbers.at(file.arm()), file.arm(), file.seed());
    });
}

std::vector<std::string> missing_jobs(const std::vector<RunFile>& files) {
    std::map<std::string, std::set<int64_t>> seeds_of;
    std::set<int64_t> seeds;
    for (const RunFile& file : files) {
        seeds_of[file.arm()].insert(file.seed());
        seeds.insert(file.seed());
    }
    std::vector<std::string> missing;
    for (const auto& [arm, own] : seeds_of)
        for (const int64_t seed : seeds)
            if (!own.contains(seed)) missing.push_back(fmt::format("{}:{}", arm, seed));
    return missing;
}

Run run_of(const json& file) {
    const json& measured = file.at("measured");
    Run run{.arm = file.at("arm"),
            .seed = file.at("seed"),
            .curve = {.loss = numbers(file.at("lm_loss")),
                      .grad_norm = numbers(file.at("grad_norm")),
                      .held_out = number(file.at("held out"))},
            .diverged = file.at("diverged"),
            .costs = {{"casts per step", file.at("casts per step")},
                      {"wire bytes per step", file.at("wire bytes per step")},
                      {"equal_choices", file.value("equal choices", json::array())}}};
    for (const char* key : {"seconds per step", "saved bytes", "saved bytes reserved", "saved bytes used"})
        run.costs[key] = measured.value(key, 0.0);
    return run;
}

Provenance as_trained(Provenance provenance, const json& file) {
    const json& machine = file.at("measured").at("machine");
    const auto text = [&](const char* key) {
        return machine.at(key).is_null() ? "" : machine.at(key).get<std::string>();
    };
    const json& clock = machine.at("gpu clock hertz");
    provenance.commit = file.at("commit");
    provenance.machine.gpu = text("gpu");
    provenance.machine.gpu_clock_hertz = clock.is_null() ? 0 : clock.get<double>();
    provenance.machine.cpu = text("cpu");
    provenance.machine.host_cores = machine.at("host cores");
    provenance.gpus = machine.at("gpus");
    provenance.ranks = machine.at("ranks");
    return provenance;
}

std::vector<Arm> arms_of(const std::vector<RunFile>& files) {
    std::vector<Arm> arms;
    for (const RunFile& file : files) {
        if (!arms.empty() && arms.back().name == file.arm()) continue;
        arms.push_back({.name = file.arm(),
                        .config = {},
                        .against = file.content.at("against"),
                        .keys = file.content.at("keys")});
    }
    return arms;
}

}  // namespace fp8flow::validate
