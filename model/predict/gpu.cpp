// SPDX-License-Identifier: MIT
// Kinds of GPU from configs/gpus, which are part of the program, and from files.
#include "model/predict/gpu.h"

#include "kernels/core/error.h"
#include "model/base/embedded.h"
#include "model/safetensors/input.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace fp8flow::predict {

namespace {

using nlohmann::json;

json parse(std::string_view text, const std::string& name) {
    json result = json::parse(text, nullptr, false);
    require(result.is_object(), ExitCode::usage, "{}: got no JSON object, want a kind of GPU (configs/gpus)",
            name);
    return result;
}

// Every number of these files must be positive. A file of the user may have any.
double number(const json& from, const std::string& key) {
    constexpr double kLeast = 1e-12, kMost = 1e18;
    const auto value = from.at(key).get<double>();
    require(value >= kLeast && value <= kMost, ExitCode::usage, "got no positive number '{}'", key);
    return value;
}
double number_if_any(const json& from, const std::string& key) {
    return from.contains(key) ? number(from, key) : 0;
}
int64_t count_of(const json& from, const std::string& key) {
    constexpr double kMost = 1 << 20;
    const double value = number(from, key);
    require(value >= 1 && value <= kMost, ExitCode::usage, "got {} as '{}', want 1 to {}", value, key, kMost);
    return static_cast<int64_t>(value);
}

Datasheet datasheet_of(const json& from) {
    return {.gpu = from.at("gpu"),
            .memory_bytes = number(from, "memory bytes"),
            .memory_rate = number(from, "memory bytes per second"),
            .bf16_per_clock = number(from, "bf16 flops per clock"),
            .fp8_per_clock = number(from, "fp8 flops per clock"),
            .boost_clock = number(from, "boost clock hertz"),
            .clock = number_if_any(from, "clock hertz"),
            .peer_rate = number(from, "peer bytes per second"),
            .network_rate = number(from, "network bytes per second"),
            .gpus_per_host = count_of(from, "gpus per host")};
}

CheckSummary check_of(const json& from) {
    return {.mean_layer = number(from, "mean layer error"),
            .worst_layer = number(from, "worst layer error"),
            .mean_step = number(from, "mean step error"),
            .worst_step = number(from, "worst step error"),
            .runs = count_of(from, "runs"),
            .gpus = from.contains("gpus") ? count_of(from, "gpus") : 1};
}

Calibration calibration_of(const json& from) {
    Calibration result{.gpu = from.at("gpu"),
                       .source = from.at("source"),
                       .commit = from.at("commit"),
                       .date = from.at("date"),
                       .launch_seconds = number(from, "launch seconds"),
                       .exchange_seconds = number(from, "exchange seconds"),
                       .host_seconds = number_if_any(from, "host seconds per launch"),
                       .late_share = number_if_any(from, "late share")};
    for (const auto& [name, recipe] : from.at("recipes").items()) {
        RecipeShares& own = result.recipes[name];
        own.clock = number(recipe, "clock hertz");
        own.whole_over_stages = number(recipe, "whole over stages");
        for (const auto& [stage, share] : recipe.at("shares").items())
            own.shares[stage] = number(recipe["shares"], stage);
    }
    for (const json& one : from.value("core attention", json::array()))
        result.core_attention.push_back(
            {count_of(one, "kv_channels"), number(one, "forward"), number(one, "backward")});
    if (!from.contains("check")) return result;
    const json& check = from["check"];
    result.check = check_of(check.value("other models", check));
    result.check->gpus = check_of(check).gpus;
    result.check->unseen = check.contains("other models");
    if (check.contains("hosts"))
        result.host_runs = {number(check["hosts"], "least"), number(check["hosts"], "most"),
                            count_of(check["hosts"], "runs")};
    return result;
}

const EmbeddedFile* find_shipped(const std::string& name) {
    for (const EmbeddedFile& file : gpu_files())
        if (name == file.name) return &file;
    return nullptr;
}

std::string lower(std::string text) {
    std::ranges::transform(text, text.begin(),
                           [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return text;
}

// True for a device "NVIDIA H200" and a GPU "H200"; "H20" is another.
bool is_kind(const std::string& device, const std::string& gpu) {
    std::istringstream words(device);
    for (std::string word; words >> word;)
        if (lower(word) == lower(gpu)) return true;
    return false;
}

// Follows "shares of" to the kind that has been profiled.
Gpu gpu_of(const json& from) {
    Gpu gpu{.sheet = datasheet_of(from), .calibrated = from.contains("calibration")};
    if (gpu.calibrated) {
        gpu.calibration = calibration_of(from["calibration"]);
        return gpu;
    }
    const EmbeddedFile* other = find_shipped(from.at("shares of"));
    require(other != nullptr, ExitCode::usage, "'shares of' names no kind of configs/gpus");
    gpu.calibration = calibration_of(parse(other->text, other->name).at("calibration"));
    return gpu;
}

// Adds the name of the file to errors.
template <class Read> auto read_as(const std::string& name, Read read) {
    try {
        return read();
    } catch (const std::exception& error) {  // of the JSON library, and Error
        fail(ExitCode::usage, "{}: {}", name, printable(error.what()));
    }
}

}  // namespace

std::vector<std::string> known_gpus() {
    std::vector<std::string> names;
    for (const EmbeddedFile& file : gpu_files()) names.emplace_back(file.name);
    return names;
}

Gpu load_gpu(const std::string& name_or_file) {
    if (const EmbeddedFile* file = find_shipped(lower(name_or_file)))
        return gpu_of(parse(file->text, file->name));
    std::error_code error;
    require(std::filesystem::is_regular_file(name_or_file, error), ExitCode::usage,
            "--gpu: got {}, want one of {} or a file", printable(name_or_file),
            fmt::join(known_gpus(), ", "));
    const json from = parse(read_text_file(name_or_file, ExitCode::usage), name_or_file);
    if (!from.contains("recipes")) return read_as(name_or_file, [&] { return gpu_of(from); });
    // what scripts/calibrate.py makes of one profile: shares of a kind in configs/gpus
    Calibration calibration = read_as(name_or_file, [&] { return calibration_of(from); });
    const auto kind = kind_of_device(calibration.gpu);
    require(kind.has_value(), ExitCode::usage, "{}: no datasheet of {} in configs/gpus", name_or_file,
            printable(calibration.gpu));
    Gpu gpu = load_gpu(*kind);
    // The profile may lack attention, stages or recipes: then the shares of configs/gpus stay.
    const Calibration shipped = gpu.calibration;
    if (calibration.core_attention.empty()) calibration.core_attention = shipped.core_attention;
    for (const auto& [recipe, shares] : shipped.recipes) {
        const auto [own, fresh] = calibration.recipes.emplace(recipe, shares);
        if (!fresh) own->second.shares.insert(shares.shares.begin(), shares.shares.end());
    }
    gpu.calibration = calibration;
    gpu.sheet.clock = 0;  // the profile's
    gpu.calibrated = true;
    return gpu;
}

std::optional<std::string> kind_of_device(const std::string& device) {
    for (const EmbeddedFile& file : gpu_files())
        if (is_kind(device, parse(file.text, file.name).value("gpu", ""))) return file.name;
    return std::nullopt;
}

}  // namespace fp8flow::predict
