// SPDX-License-Identifier: MIT
// Bounded reading of records: memory follows from the number of iterations, not from the file.
#include "model/report/records.h"

#include "model/safetensors/json.h"

#include <istream>
#include <string>

namespace fp8flow::report {

namespace {

constexpr const char* kName = "metrics.jsonl";
constexpr size_t kMaxRecordBytes = 1 << 20;
constexpr int kMaxRecordsOfIteration = 4;  // a step's, an evaluation's, and room for more

// A whole line without its end; false at the end of the file and for one that is too long.
bool read_line(std::istream& lines, std::string& line) {
    constexpr int kEnd = std::char_traits<char>::eof();
    line.clear();
    for (int c = 0; (c = lines.get()) != kEnd && c != '\n'; line += static_cast<char>(c))
        if (line.size() == kMaxRecordBytes) return false;
    return lines.good() || !line.empty();
}

nlohmann::json parse_record(const std::string& line) {
    try {
        return parse_json(line, kName, ExitCode::output);
    } catch (const Error&) {
        return nullptr;
    }
}

}  // namespace

std::vector<nlohmann::json> parse_records(std::istream& lines, int64_t steps) {
    std::vector<nlohmann::json> records;
    std::string line;
    int64_t last = 0;
    for (int of_iteration = 0; read_line(lines, line);) {
        nlohmann::json record = parse_record(line);
        if (!record.is_object() || !record.contains("iteration") || !record["iteration"].is_number_integer())
            break;
        const auto iteration = record["iteration"].get<int64_t>();
        of_iteration = iteration == last ? of_iteration + 1 : 1;
        if (iteration < last || iteration > steps || of_iteration > kMaxRecordsOfIteration) break;
        last = iteration;
        records.push_back(std::move(record));
    }
    return records;
}

}  // namespace fp8flow::report
