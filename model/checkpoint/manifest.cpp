// SPDX-License-Identifier: MIT
// The manifest as text and back. Strict by construction: what was read is written again and must give the
// same bytes.
#include "model/checkpoint/manifest.h"

#include "model/base/crc32c.h"
#include "model/safetensors/input.h"
#include "model/safetensors/json.h"

#include <nlohmann/json.hpp>

namespace fp8flow::checkpoint {

namespace {

constexpr int64_t kVersion = 1;
constexpr const char* kFormat = "fp8flow checkpoint";

std::string first_line(uint32_t crc) { return fmt::format("{{\"crc32c\": \"{:08x}\",\n", crc); }
const size_t kFirstLine = first_line(0).size();

std::string body(const CheckpointManifest& manifest) {
    using Json = nlohmann::ordered_json;
    Json json;
    json["format"] = kFormat;
    json["version"] = kVersion;
    json["step"] = manifest.step;
    if (manifest.applied_steps) json["applied_steps"] = *manifest.applied_steps;
    json["consumed_samples"] = manifest.consumed_samples;
    json["expert_model_parallel_size"] = manifest.expert_parallel_size;
    json["global_batch_size"] = manifest.global_batch_size;
    json["seed"] = manifest.seed;
    if (manifest.seq_length != 0) json["seq_length"] = manifest.seq_length;
    json["data_fingerprint"] = checksum_text(manifest.data_fingerprint);
    if (manifest.run != 0) json["run"] = checksum_text(manifest.run);
    json["commit"] = manifest.commit;
    json["config"] = manifest.config;
    Json files = Json::array();
    for (const CheckpointManifest::File& file : manifest.files)
        files.push_back({{"bytes", file.bytes}, {"header_crc32c", fmt::format("{:08x}", file.header_crc)}});
    json["files"] = std::move(files);
    // Without its opening brace, which precedes the checksum.
    return json.dump(1, ' ', false, Json::error_handler_t::replace).substr(2) + "\n";
}

// Both throw std::exception. Texts that body() would write differently are found by writing them again.
uint64_t hex_word(const nlohmann::json& json) { return std::stoull(json.get<std::string>(), nullptr, 16); }
int64_t whole(const nlohmann::json& json) { return whole_number(json).value(); }

CheckpointManifest read_fields(const nlohmann::json& json) {
    CheckpointManifest manifest{.step = whole(json.at("step")),
                                .consumed_samples = whole(json.at("consumed_samples")),
                                .expert_parallel_size = whole(json.at("expert_model_parallel_size")),
                                .global_batch_size = whole(json.at("global_batch_size")),
                                .seed = json.at("seed").get_ref<const uint64_t&>(),
                                .data_fingerprint = hex_word(json.at("data_fingerprint")),
                                .commit = json.at("commit").get<std::string>(),
                                .config = json.at("config").get<std::string>()};
    if (json.contains("seq_length")) manifest.seq_length = whole(json["seq_length"]);
    if (json.contains("run")) manifest.run = hex_word(json["run"]);
    if (json.contains("applied_steps")) manifest.applied_steps = whole(json["applied_steps"]);
    for (const nlohmann::json& file : json.at("files"))
        manifest.files.push_back(
            {whole(file.at("bytes")), static_cast<uint32_t>(hex_word(file.at("header_crc32c")))});
    return manifest;
}

}  // namespace

std::string rank_file_name(int64_t rank) { return fmt::format("rank_{:04d}.safetensors", rank); }

std::string manifest_text(const CheckpointManifest& manifest) {
    const std::string text = body(manifest);
    return first_line(crc32c(text)) + text;
}

CheckpointManifest parse_manifest(std::string_view text, const std::string& where) {
    const auto refuse_if = [&](bool bad, std::string_view why) {
        require(!bad, ExitCode::checkpoint, "{}: {}", where, why);
    };
    refuse_if(static_cast<int64_t>(text.size()) > kMaxManifestBytes, "larger than any manifest (16 MiB)");
    refuse_if(text.size() < kFirstLine || text.substr(0, 12) != first_line(0).substr(0, 12),
              "no manifest of a checkpoint: it does not begin with a checksum");
    const std::string_view rest = text.substr(kFirstLine);
    refuse_if(text.substr(0, kFirstLine) != first_line(crc32c(rest)),
              "the checksum does not fit: damaged, or changed by hand");
    CheckpointManifest manifest;
    try {
        const auto json = nlohmann::json::parse("{" + std::string(rest));
        const int64_t version = whole(json.at("version"));
        refuse_if(json.at("format").get<std::string>() != kFormat, "not a manifest of this program");
        require(version == kVersion, ExitCode::checkpoint, "{}: version {}, this program reads {}", where,
                version, kVersion);
        manifest = read_fields(json);
    } catch (const Error&) {
        throw;
    } catch (const std::exception&) {
        refuse_if(true, "not in the form that this program writes");
    }
    refuse_if(body(manifest) != rest, "not in the form that this program writes");
    const auto wrong = [&](const char* key, int64_t value) {
        fail(ExitCode::checkpoint, "{}: {} is {}", where, key, value);
    };
    if (manifest.step < 0) wrong("step", manifest.step);
    if (const int64_t applied = manifest.applied_steps.value_or(0); applied < 0 || applied > manifest.step)
        wrong("applied_steps", applied);
    if (manifest.global_batch_size < 1) wrong("global_batch_size", manifest.global_batch_size);
    if (manifest.seq_length < 0) wrong("seq_length", manifest.seq_length);
    int64_t samples = 0;
    if (__builtin_mul_overflow(manifest.step, manifest.global_batch_size, &samples) ||
        manifest.consumed_samples < 0 || manifest.consumed_samples % manifest.global_batch_size != 0)
        wrong("consumed_samples", manifest.consumed_samples);
    const auto ranks = static_cast<int64_t>(manifest.files.size());
    if (manifest.expert_parallel_size < 1 || ranks < 1 || ranks % manifest.expert_parallel_size != 0)
        fail(ExitCode::checkpoint, "{}: {} files for expert_model_parallel_size {}", where, ranks,
             manifest.expert_parallel_size);
    for (const CheckpointManifest::File& file : manifest.files)
        if (file.bytes < 1) wrong("the size of a file", file.bytes);
    return manifest;
}

}  // namespace fp8flow::checkpoint
