// SPDX-License-Identifier: MIT
// Framing, encoding, and which numbers of a step have which tag.
#include "model/report/tensorboard.h"

#include "kernels/host_memory.h"
#include "model/base/crc32c.h"
#include "model/report/tensor_stats.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>

namespace fp8flow::report {

namespace {

template <class Word> std::string little_endian(Word word) {
    static_assert(std::endian::native == std::endian::little);
    return {reinterpret_cast<const char*>(&word), sizeof word};
}

std::string masked_crc(std::string_view bytes) {
    const uint32_t crc = crc32c(bytes);
    return little_endian(std::rotr(crc, 15) + 0xa282ead8u);
}

std::string varint(uint64_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7F) | 0x80);
    return bytes + static_cast<char>(value);
}

// Fields: number and wire type in one byte (0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes), then
// the value.
std::string key(int field, int wire_type) { return varint(static_cast<uint64_t>((field << 3) | wire_type)); }
std::string field_varint(int field, uint64_t value) { return key(field, 0) + varint(value); }
std::string field_double(int field, double value) { return key(field, 1) + little_endian(value); }
std::string field_float(int field, float value) { return key(field, 5) + little_endian(value); }
std::string field_bytes(int field, std::string_view bytes) {
    return key(field, 2) + varint(bytes.size()) + std::string(bytes);
}

std::string event(double wall_time, int64_t step) {
    return field_double(1, wall_time) + field_varint(2, static_cast<uint64_t>(step));
}

double seconds_of(std::chrono::system_clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
}

std::string scalar(std::chrono::system_clock::time_point time, int64_t step, std::string_view tag,
                   double value) {
    return tfrecord(scalar_event(seconds_of(time), step, tag, static_cast<float>(value)));
}

// A name that does not exist yet: a run that returns to a checkpoint starts a new file.
std::string new_file_name(const OutputFolder& folder, std::chrono::system_clock::time_point now) {
    std::string host = host_name().text;
    const auto odd = [](char c) { return !std::isalnum(static_cast<unsigned char>(c)) && c != '-'; };
    std::ranges::replace_if(host, odd, '_');
    for (auto seconds = static_cast<int64_t>(seconds_of(now));; ++seconds) {
        const std::string file = fmt::format("events.out.tfevents.{}.{}.{}", seconds, host, ::getpid());
        if (!std::filesystem::exists(folder.path_of(file))) return file;
    }
}

}  // namespace

std::string tfrecord(std::string_view bytes) {
    const std::string length = little_endian(static_cast<uint64_t>(bytes.size()));
    return length + masked_crc(length) + std::string(bytes) + masked_crc(bytes);
}

std::string version_event(double wall_time) { return event(wall_time, 0) + field_bytes(3, "brain.Event:2"); }

std::string scalar_event(double wall_time, int64_t step, std::string_view tag, float value) {
    return event(wall_time, step) +
           field_bytes(5, field_bytes(1, field_bytes(1, tag) + field_float(2, value)));
}

std::string start_event(double wall_time, int64_t step) {
    return event(wall_time, step) + field_bytes(7, field_varint(1, 1));
}

EventFile::EventFile(const OutputFolder& folder, const Config& config, int64_t done)
    : config_(config),
      file_(folder.open_lines(new_file_name(folder, std::chrono::system_clock::now()),
                              LineFile::Start::truncate)) {
    const double now = seconds_of(std::chrono::system_clock::now());
    file_.write_bytes(tfrecord(version_event(now)) + tfrecord(start_event(now, done + 1)));
}

void EventFile::step(const StepValues& values) {
    std::string records;
    const auto add = [&](const std::string& tag, double value) {
        records += scalar(values.time, values.iteration(), tag, value);
    };
    for (const StepField& field : step_fields()) {
        const std::optional<double> value = shown(field, values);
        if (!value || field.tag == nullptr) continue;
        add(field.tag, *value);
        const auto by_layer = values.record.find(std::string(field.name) + "_by_layer");
        if (!config_.output.moe_per_layer_logging || by_layer == values.record.end()) continue;
        for (size_t i = 0; i < by_layer->size(); ++i)
            add(fmt::format("moe/{}_layer_{}", field.tag,
                            values.record.at("moe_layers").at(i).get<int64_t>()),
                by_layer->at(i));
    }
    file_.write_bytes(records);
}

void EventFile::tensor_stats(int64_t iteration, const std::vector<nlohmann::json>& records) {
    const auto now = std::chrono::system_clock::now();
    std::string events;
    for (const nlohmann::json& record : records)
        for (const char* key : kTensorMeasures) {
            const std::string tag =
                fmt::format("tensor_stats/{}/{}_layer_{}", key, record.at("tensor").get<std::string>(),
                            record.at("layer").get<int64_t>());
            events += scalar(now, iteration, tag, record.at(key));
        }
    file_.write_bytes(events);
}

void EventFile::evaluation(int64_t iteration, double nats) {
    const auto now = std::chrono::system_clock::now();
    const double perplexity = std::exp(std::min(20.0, nats));  // Megatron's limit
    file_.write_bytes(scalar(now, iteration, "lm loss validation", nats) +
                      scalar(now, iteration, "lm loss validation ppl", perplexity));
}

}  // namespace fp8flow::report
