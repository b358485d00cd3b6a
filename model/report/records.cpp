// SPDX-License-Identifier: MIT
// Bounded reading of records: memory follows from the number of iterations and of lines, not from what they
// hold.
#include "model/report/records.h"

#include "model/safetensors/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <istream>
#include <string>

namespace fp8flow::report {

namespace {

constexpr const char* kName = "metrics.jsonl";
constexpr size_t kMaxRecordBytes = 1 << 20;
constexpr int kMaxRecordsOfIteration = 4;  // a step's, an evaluation's, and room for more

// A line without its end, and of a longer one no more than is too long; false at the end of the file.
bool read_line(std::istream& lines, std::string& line) {
    constexpr int kEnd = std::char_traits<char>::eof();
    line.clear();
    for (int c = 0; (c = lines.get()) != kEnd && c != '\n';)
        if (line.size() <= kMaxRecordBytes) line += static_cast<char>(c);
    return lines.good() || !line.empty();
}

nlohmann::json parse_record(const std::string& line) {
    if (line.size() > kMaxRecordBytes) return nullptr;
    try {
        return parse_json(line, kName, ExitCode::output);
    } catch (const Error&) {
        return nullptr;
    }
}

// Adds what is below `value` to `out`.
void flatten(nlohmann::json& out, std::string name, const nlohmann::json& value) {
    const auto plain = [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    };
    std::replace_if(
        name.begin(), name.end(), [&](char c) { return !plain(c); }, '_');
    if (!value.is_object()) {
        out[name] = value;
        return;
    }
    for (const auto& [key, below] : value.items()) flatten(out, name + "_" + key, below);
}

// An object a layer becomes an array a name.
void add_load(nlohmann::json& out, const nlohmann::json& load) {
    constexpr std::pair<const char*, const char*> kNames[] = {{"layer", "moe_layers"},
                                                              {"max", "load_max"},
                                                              {"min", "load_min"},
                                                              {"cv", "load_cv"},
                                                              {"dead", "dead_experts"}};
    for (const auto& [old, name] : kNames) {
        nlohmann::json values = nlohmann::json::array();
        for (const nlohmann::json& layer : load)
            values.push_back(layer.is_object() && layer.contains(old) ? layer[old] : nlohmann::json(nullptr));
        out[name] = std::move(values);
    }
}

}  // namespace

nlohmann::json flat(const nlohmann::json& record) {
    nlohmann::json out = nlohmann::json::object();
    for (const auto& [key, value] : record.items()) flatten(out, key, value);
    return out;
}

nlohmann::json record_of_today(const nlohmann::json& record) {
    if (record.contains("type")) return record;
    nlohmann::json out = nlohmann::json::object();
    for (const auto& [key, value] : record.items()) {
        if (key == "load" && value.is_array())
            add_load(out, value);
        else if (key == "iteration-time")
            flatten(out, "seconds", value);
        else if (key == "TFLOP/s per rank")
            flatten(out, "tflops_per_gpu", value);
        else
            flatten(out, key, value);
    }
    out["type"] = record.contains("held-out loss") ? "evaluation" : "step";
    return out;
}

std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps) {
    std::vector<nlohmann::json> records;
    std::string line;
    int64_t last = 0;
    for (int of_iteration = 0; read_line(lines, line);) {
        nlohmann::json record = parse_record(line);
        if (!record.is_object() || !record.contains("iteration") || !record["iteration"].is_number_integer())
            continue;
        const auto iteration = record["iteration"].get<int64_t>();
        if (iteration < last || iteration > steps) continue;
        of_iteration = iteration == last ? of_iteration + 1 : 1;
        last = iteration;
        if (of_iteration <= kMaxRecordsOfIteration) records.push_back(record_of_today(record));
    }
    return records;
}

std::string missing_iterations(const std::vector<nlohmann::json>& records, int64_t steps) {
    constexpr int kMostRanges = 8;
    std::string text;
    int ranges = 0;
    int64_t next = 1;
    if (!records.empty() && records.front()["type"] == "run") next = records.front()["iteration"];
    const auto missing = [&](int64_t first, int64_t last) {
        if (first > last || ++ranges > kMostRanges + 1) return;
        text += ranges == 1 ? "" : ", ";
        text += ranges > kMostRanges ? "..."
                : first == last      ? fmt::format("{}", first)
                                     : fmt::format("{}-{}", first, last);
    };
    for (const nlohmann::json& record : records) {
        if (record["type"] != "step") continue;
        const auto iteration = record["iteration"].get<int64_t>();
        missing(next, iteration - 1);
        next = std::max(next, iteration + 1);
    }
    missing(next, steps);
    return text;
}

std::string note_of_old_losses(const std::vector<nlohmann::json>& records) {
    int64_t last = 0;
    const auto has = [](const nlohmann::json& record, const char* key) {
        return record.contains(key) && record[key].is_number() && record[key] != 0;
    };
    for (const nlohmann::json& record : records)
        if (!record.contains("z_loss_by_layer") &&
            (has(record, "load_balancing_loss") || has(record, "z_loss")))
            last = record.at("iteration");
    if (last == 0) return {};
    return fmt::format(
        "up to iteration {} metrics.jsonl has load_balancing_loss and z_loss of an earlier "
        "version: with coefficients, summed over kinds and layers",
        last);
}

}  // namespace fp8flow::report
