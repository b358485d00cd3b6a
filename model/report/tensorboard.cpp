// SPDX-License-Identifier: MIT
// Framing, encoding, and which numbers of a step have which tag.
#include "model/report/tensorboard.h"

#include "kernels/host_memory.h"
#include "model/base/crc32c.h"
#include "model/base/run_folder.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
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

// One that is not there: a run that goes back to a checkpoint begins another one.
std::string new_file_name(const OutputFolder& folder, std::chrono::system_clock::time_point now) {
    std::string host = host_name().text;
    const auto odd = [](char c) { return !std::isalnum(static_cast<unsigned char>(c)) && c != '-'; };
    std::replace_if(host.begin(), host.end(), odd, '_');
    for (auto seconds = static_cast<int64_t>(seconds_of(now));; ++seconds) {
        const std::string file = fmt::format("events.out.tfevents.{}.{}.{}", seconds, host, ::getpid());
        if (!std::filesystem::exists(folder.path_of(file))) return file;
    }
}

constexpr std::string_view kBySamples = " vs samples";

// The step of an event as `event` begins it, after the time; 0 for the version.
int64_t step_of(std::string_view event) {
    uint64_t step = 0;
    size_t at = 1 + sizeof(double) + 1;
    for (int shift = 0; at < event.size() && shift < 64; shift += 7) {
        const auto byte = static_cast<uint8_t>(event[at++]);
        step |= static_cast<uint64_t>(byte & 0x7F) << shift;
        if (byte < 0x80) break;
    }
    return static_cast<int64_t>(step);
}

// Where the first iteration after `last` begins, 0 where none is before it; nothing where there is none. Ends
// at a record that is torn or damaged, as TensorBoard does. Scalars by samples follow those of their
// iteration.
std::optional<int64_t> end_of_iteration(std::istream& file, int64_t last) {
    constexpr uint64_t kLargestEvent = 1 << 20;
    std::string head(sizeof(uint64_t) + sizeof(uint32_t), '\0'), event;
    bool holds_others = false;
    for (int64_t at = 0; file.read(head.data(), std::ssize(head));
         at += std::ssize(head) + std::ssize(event)) {
        uint64_t length = 0;
        std::memcpy(&length, head.data(), sizeof length);
        if (masked_crc(head.substr(0, sizeof length)) != head.substr(sizeof length) || length > kLargestEvent)
            break;
        event.resize(length + sizeof(uint32_t));
        if (!file.read(event.data(), std::ssize(event))) break;
        if (event.find(kBySamples) != std::string::npos) continue;
        const int64_t step = step_of(event);
        if (step > last) return holds_others ? at : 0;
        holds_others = holds_others || step > 0;
    }
    return std::nullopt;
}

// Scalars of one iteration, by iteration and, where Megatron has it twice, by samples.
struct Scalars {
    double time;
    int64_t iteration, samples;
    std::string records = {};

    void add(const std::string& tag, double value, bool by_samples = false) {
        const auto number = static_cast<float>(value);
        records += tfrecord(scalar_event(time, iteration, tag, number));
        if (by_samples)
            records += tfrecord(scalar_event(time, samples, tag + std::string(kBySamples), number));
    }
};

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

void forget_events_after(const OutputFolder& run, int64_t last) {
    namespace fs = std::filesystem;
    for (const std::string& path : files_of_run(run.path())) {
        if (!is_event_file(path)) continue;
        std::ifstream file(path, std::ios::binary);
        const std::optional<int64_t> end = end_of_iteration(file, last);
        std::error_code error;
        if (end == 0) fs::remove(path, error);
        if (end.value_or(0) > 0) fs::resize_file(path, static_cast<uintmax_t>(*end), error);
        require(!error, ExitCode::output, "{}: cannot cut off iterations that are done again: {}", path,
                error.message());
    }
}

EventFile::EventFile(const OutputFolder& folder, const Config& config)
    : config_(config),
      file_(folder.open_lines(new_file_name(folder, std::chrono::system_clock::now()),
                              LineFile::Start::truncate)) {
    file_.write_bytes(tfrecord(version_event(seconds_of(std::chrono::system_clock::now()))));
}

void EventFile::step(const StepValues& values) {
    Scalars scalars{seconds_of(values.time), values.iteration(), values.others.at("consumed_samples")};
    for (const StepField& field : step_fields()) {
        const std::optional<double> value = shown(field, values);
        if (!value || field.tag == nullptr) continue;
        scalars.add(field.tag, *value, field.by_samples);
        const auto by_layer = values.record.find(std::string(field.name) + "_by_layer");
        if (!config_.output.moe_per_layer_logging || by_layer == values.record.end()) continue;
        for (size_t i = 0; i < by_layer->size(); ++i)
            scalars.add(fmt::format("moe/{}_layer_{}", field.tag,
                                    values.record.at("moe_layers").at(i).get<int64_t>()),
                        by_layer->at(i));
    }
    file_.write_bytes(scalars.records);
}

void EventFile::evaluation(int64_t iteration, double nats) {
    Scalars scalars{seconds_of(std::chrono::system_clock::now()), iteration,
                    iteration * config_.training.global_batch_size};
    scalars.add("lm loss validation", nats, true);
    scalars.add("lm loss validation ppl", std::exp(std::min(20.0, nats)), true);  // Megatron's limit
    file_.write_bytes(scalars.records);
}

}  // namespace fp8flow::report
