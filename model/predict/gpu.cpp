// SPDX-License-Identifier: MIT
// Kinds of GPU from configs/gpus, which are part of the program, and from files.
#include "model/predict/gpu.h"

#include "kernels/core/error.h"
#include "model/predict/gpu_files.h"
#include "model/safetensors/file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <sstream>

namespace fp8flow::predict {

namespace {

using nlohmann::json;

json parse(const std::string& text, const std::string& name) {
    json result = json::parse(text, nullptr, false);
    require(result.is_object(), ExitCode::usage, "{}: got no JSON object, want a kind of GPU (configs/gpus)",
            name);
    return result;
}

// Every number of these files is positive; a file from elsewhere may say anything.
double number(const json& from, const char* key, const std::string& name) {
    constexpr double kLeast = 1e-12, kMost = 1e18;
    const auto found = from.find(key);
    require(found != from.end() && found->is_number() && found->get<double>() >= kLeast &&
                found->get<double>() <= kMost,
            ExitCode::usage, "{}: got no positive number '{}'", name, printable(key));
    return found->get<double>();
}
int64_t count_of(const json& from, const char* key, const std::string& name) {
    constexpr double kMost = 1 << 20;
    const double value = number(from, key, name);
    require(value >= 1 && value <= kMost, ExitCode::usage, "{}: got {} as '{}', want 1 to {}", name, value,
            key, kMost);
    return static_cast<int64_t>(value);
}
std::string text_of(const json& from, const char* key, const std::string& name) {
    const auto found = from.find(key);
    require(found != from.end() && found->is_string(), ExitCode::usage, "{}: got no text '{}'", name, key);
    return found->get<std::string>();
}

Datasheet parse_datasheet(const json& from, const std::string& name) {
    return {.gpu = text_of(from, "gpu", name),
            .memory_bytes = number(from, "memory bytes", name),
            .memory_rate = number(from, "memory bytes per second", name),
            .bf16_per_clock = number(from, "bf16 flops per clock", name),
            .fp8_per_clock = number(from, "fp8 flops per clock", name),
            .boost_clock = number(from, "boost clock hertz", name),
            .clock = from.contains("clock hertz") ? number(from, "clock hertz", name) : 0,
            .peer_rate = number(from, "peer bytes per second", name),
            .network_rate = number(from, "network bytes per second", name),
            .gpus_per_host = count_of(from, "gpus per host", name)};
}

RecipeShares parse_recipe(const json& from, const std::string& name) {
    require(from.is_object(), ExitCode::usage, "{}: got a recipe without shares", name);
    RecipeShares result{.clock = number(from, "clock hertz", name),
                        .whole_over_stages = number(from, "whole over stages", name),
                        .shares = {}};
    const auto shares = from.find("shares");
    require(shares != from.end() && shares->is_object(), ExitCode::usage, "{}: got no 'shares'", name);
    for (const auto& [stage, share] : shares->items())
        result.shares[stage] = number(*shares, stage.c_str(), name);
    return result;
}

CheckSummary parse_check(const json& from, const std::string& name) {
    return {.mean_layer = number(from, "mean layer error", name),
            .worst_layer = number(from, "worst layer error", name),
            .mean_step = number(from, "mean step error", name),
            .worst_step = number(from, "worst step error", name),
            .runs = count_of(from, "runs", name),
            .gpus = from.contains("gpus") ? count_of(from, "gpus", name) : 1};
}

Calibration calibration_of(const json& from, const std::string& name) {
    require(from.is_object(), ExitCode::usage, "{}: got a calibration that is no JSON object", name);
    const auto number_if_any = [&](const char* key) {
        return from.contains(key) ? number(from, key, name) : 0;
    };
    Calibration result{.gpu = text_of(from, "gpu", name),
                       .source = text_of(from, "source", name),
                       .commit = text_of(from, "commit", name),
                       .date = text_of(from, "date", name),
                       .launch_seconds = number(from, "launch seconds", name),
                       .exchange_seconds = number(from, "exchange seconds", name),
                       .host_seconds = number_if_any("host seconds per launch"),
                       .late_share = number_if_any("late share")};
    const auto recipes = from.find("recipes");
    require(recipes != from.end() && recipes->is_object(), ExitCode::usage, "{}: got no 'recipes'", name);
    for (const auto& [recipe, shares] : recipes->items()) result.recipes[recipe] = parse_recipe(shares, name);
    const json attention = from.value("core attention", json::array());
    for (const json& one : attention)
        if (one.is_object())
            result.core_attention.push_back({count_of(one, "kv_channels", name), number(one, "forward", name),
                                             number(one, "backward", name)});
    if (const auto check = from.find("check"); check != from.end()) {
        result.check = parse_check(*check, name);
        if (const auto other = check->find("other models"); other != check->end())
            result.check_other_models = parse_check(*other, name);
    }
    return result;
}

const GpuFile* find_shipped(const std::string& name) {
    for (const GpuFile& file : shipped_gpu_files())
        if (name == file.name) return &file;
    return nullptr;
}

std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(),
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
Gpu gpu_of(const json& from, const std::string& name) {
    Gpu gpu{.sheet = parse_datasheet(from, name), .calibration = {}, .calibrated = false};
    const auto calibration = from.find("calibration");
    if (calibration != from.end()) {
        gpu.calibration = calibration_of(*calibration, name);
        gpu.calibrated = true;
        return gpu;
    }
    const GpuFile* other = find_shipped(text_of(from, "shares of", name));
    require(other != nullptr, ExitCode::usage, "{}: 'shares of' names no kind of configs/gpus", name);
    const json shares = parse(other->text, other->name);
    require(shares.contains("calibration"), ExitCode::usage, "{}: {} has no shares of its own", name,
            other->name);
    gpu.calibration = calibration_of(shares["calibration"], other->name);
    return gpu;
}

}  // namespace

std::vector<std::string> known_gpus() {
    std::vector<std::string> names;
    for (const GpuFile& file : shipped_gpu_files()) names.emplace_back(file.name);
    return names;
}

Gpu load_gpu(const std::string& name_or_file) {
    if (const GpuFile* file = find_shipped(lower(name_or_file)))
        return gpu_of(parse(file->text, file->name), file->name);
    std::error_code error;
    require(std::filesystem::is_regular_file(name_or_file, error), ExitCode::usage,
            "--gpu: got {}, want one of {} or a file", printable(name_or_file),
            fmt::join(known_gpus(), ", "));
    const json from = parse(read_text_file(name_or_file, ExitCode::usage), name_or_file);
    if (!from.contains("recipes")) return gpu_of(from, name_or_file);
    // what scripts/calibrate.py makes of one profile: shares of a kind in configs/gpus
    Calibration calibration = calibration_of(from, name_or_file);
    const auto kind = kind_of_device(calibration.gpu);
    require(kind.has_value(), ExitCode::usage, "{}: no datasheet of {} in configs/gpus", name_or_file,
            printable(calibration.gpu));
    Gpu gpu = load_gpu(*kind);
    // One profile may say nothing of attention, some stages and recipes: then the kind's own stay.
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
    for (const GpuFile& file : shipped_gpu_files())
        if (is_kind(device, parse(file.text, file.name).value("gpu", ""))) return file.name;
    return std::nullopt;
}

}  // namespace fp8flow::predict
