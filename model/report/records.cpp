// SPDX-License-Identifier: MIT
// Bounded reading of records: memory follows from the number of iterations and of lines, not from what they
// hold.
#include "model/report/records.h"

#include "model/safetensors/json.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace fp8flow::report {

namespace {

constexpr size_t kMaxRecordBytes = 1 << 20;
constexpr int kMaxRecordsOfIteration = 4;  // a step's, an evaluation's, and two more

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
        return parse_json(line, kMetricsFile, ExitCode::output);
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

}  // namespace

nlohmann::json flat(const nlohmann::json& record) {
    nlohmann::json out = nlohmann::json::object();
    for (const auto& [key, value] : record.items()) flatten(out, key, value);
    return out;
}

std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps) {
    std::vector<nlohmann::json> records;
    std::string line;
    int64_t last = 0;
    for (int of_iteration = 0; read_line(lines, line);) {
        nlohmann::json record = parse_record(line);
        if (!record.is_object() || !record.contains("type") || !record.contains("iteration") ||
            !record["iteration"].is_number_integer())
            continue;
        const auto iteration = record["iteration"].get<int64_t>();
        if (iteration < last || iteration > steps) continue;
        of_iteration = iteration == last ? of_iteration + 1 : 1;
        last = iteration;
        if (of_iteration <= kMaxRecordsOfIteration) records.push_back(std::move(record));
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
