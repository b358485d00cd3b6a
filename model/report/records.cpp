// SPDX-License-Identifier: MIT
// Reading of records.
#include "model/report/records.h"

#include "model/safetensors/json.h"

#include <cctype>
#include <filesystem>
#include <fstream>

namespace fp8flow::report {

namespace {

nlohmann::json parse_record(const std::string& line) {
    try {
        return parse_json(line, kMetricsFile, ExitCode::output);
    } catch (const Error&) {
        return nullptr;
    }
}

// Adds `value`, or everything below it, to `out`.
void flatten(nlohmann::json& out, std::string name, const nlohmann::json& value) {
    const auto odd = [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); };
    std::ranges::replace_if(name, odd, '_');
    if (!value.is_object()) {
        out[name] = value;
        return;
    }
    for (const auto& [key, below] : value.items()) flatten(out, name + "_" + key, below);
}

}  // namespace

nlohmann::json flat(const nlohmann::json& record) {
    nlohmann::json out = nlohmann::json::object();
    for (const auto& [key, value] : record.items()) flatten(out, key, value);
    return out;
}

std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps) {
    std::vector<nlohmann::json> records;
    int64_t last = 0;
    for (std::string line; std::getline(lines, line);) {
        nlohmann::json record = parse_record(line);
        if (!record.is_object() || !record.contains("type") || !record.contains("iteration") ||
            !record["iteration"].is_number_integer())
            continue;
        const auto iteration = record["iteration"].get<int64_t>();
        if (iteration < last || iteration > steps) continue;
        last = iteration;
        records.push_back(std::move(record));
    }
    return records;
}

std::vector<nlohmann::json> read_records(const std::string& path, int64_t steps) {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::file_status status = fs::symlink_status(path, error);
    if (steps == 0 || !fs::exists(status)) return {};
    require(fs::is_regular_file(status), ExitCode::output,
            "{}: not a regular file; remove it, or set output.metrics=false", path);
    std::ifstream file(path, std::ios::binary);
    return parse_records(file, steps);
}

int64_t missing_iterations(const std::vector<nlohmann::json>& records, int64_t steps) {
    int64_t last = 0, missing = steps;
    if (!records.empty() && records.front()["type"] == "run")
        missing -= records.front()["iteration"].get<int64_t>() - 1;
    for (const nlohmann::json& record : records)
        if (record["type"] == "step" && record["iteration"] > last) {
            last = record["iteration"];
            --missing;
        }
    return missing;
}

}  // namespace fp8flow::report
