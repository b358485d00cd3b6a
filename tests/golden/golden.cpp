// SPDX-License-Identifier: MIT
// Running, hashing, reading and writing of golden cases.
#include "tests/golden/golden.h"

#include "kernels/core/random.h"
#include "model/data/permutation.h"
#include "tests/support/training.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <thread>

namespace fp8flow::golden {

namespace {

std::string hash_text(uint64_t hash) { return fmt::format("{:016x}", hash); }
template <class Number> uint64_t hash_of_bytes(const std::vector<Number>& values) {
    return fnv1a64({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Number)});
}
std::string hash_of(const std::vector<double>& values) { return hash_text(hash_of_bytes(values)); }
std::string hash_of(const test::Values& values) {
    uint64_t hash = 0;
    for (const auto& [name, floats] : values) {  // by name
        if (!name.starts_with("weight ") && !name.starts_with("bias ")) continue;
        hash = data::mix64(hash, fnv1a64(name), hash_of_bytes(floats));
    }
    return hash_text(hash);
}

nlohmann::ordered_json json_of(const Row& row) {
    return {{"recipe", row.c.recipe},
            {"recompute", row.c.recompute},
            {"EP", row.c.expert_ranks},
            {"DP", row.c.ranks},
            {"dispatcher", row.c.dispatcher},
            {"micro_batches", row.c.micro_batches},
            {"variant", row.c.variant},
            {"losses", row.hashes.losses},
            {"norms", row.hashes.norms},
            {"weights", row.hashes.weights},
            {"last_loss", fmt::format("{:.9f}", row.hashes.last_loss)}};
}

Row row_of(const nlohmann::json& json) {
    return {.c = {.recipe = json.at("recipe"),
                  .recompute = json.at("recompute"),
                  .expert_ranks = json.at("EP"),
                  .ranks = json.at("DP"),
                  .dispatcher = json.at("dispatcher"),
                  .micro_batches = json.at("micro_batches"),
                  .variant = json.at("variant")},
            .hashes = {.last_loss = std::stod(json.at("last_loss").get<std::string>()),
                       .losses = json.at("losses"),
                       .norms = json.at("norms"),
                       .weights = json.at("weights")}};
}

}  // namespace

Hashes run_case(const Case& c, ProcessGroup& world, const BackendChoice& backend, std::string* note,
                int64_t steps) {
    const Config config = c.config();
    Trainer trainer(config, world, backend, Arithmetic::stated, open_data(config));
    if (note != nullptr) *note = trainer.exchange_note();
    std::vector<double> losses, norms;
    const auto take = [&](const std::optional<StepResult>& result) {
        if (!result) return;
        losses.insert(losses.end(), {result->lm_loss, result->balancing_loss, result->z_loss});
        norms.push_back(result->grad_norm);
    };
    for (int64_t i = 0; i < steps; ++i) take(trainer.step());
    take(trainer.drain());
    return {.last_loss = losses.at(losses.size() - 3),
            .losses = hash_of(losses),
            .norms = hash_of(norms),
            .weights = hash_of(test::collect(trainer, world, c.expert_ranks))};
}

namespace {

Hashes run_on_threads(const Case& c) {
    std::vector<Hashes> hashes(static_cast<size_t>(c.ranks));
    run_thread_ranks(c.ranks, test::kTestDeadline, [&](ProcessGroup& world) {
        hashes[static_cast<size_t>(world.rank())] =
            run_case(c, world, choose_backend(BackendKind::reference));
    });
    for (const Hashes& other : hashes) EXPECT_TRUE(other == hashes[0]) << c.name() << ": ranks disagree";
    return hashes[0];
}

}  // namespace

std::vector<Hashes> run_all_on_threads() {
    // A case's memory serves the next one: fresh pages for each would cost a third of the time.
    ::mallopt(M_ARENA_MAX, 1);
    ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
    ::mallopt(M_TRIM_THRESHOLD, INT_MAX);
    const std::vector<Case>& cases = all_cases();
    std::vector<Hashes> hashes(cases.size());
    std::atomic<size_t> next = 0;
    const auto work = [&] {
        for (size_t i = next++; i < cases.size(); i = next++) {
            try {
                hashes[i] = run_on_threads(cases[i]);
            } catch (const std::exception& error) {
                ADD_FAILURE() << cases[i].name() << ": " << error.what();
            }
        }
    };
    std::thread other(work);
    work();
    other.join();
    return hashes;
}

bool File::read() {
    rows_.clear();
    std::ifstream file(path_);
    if (!file) return false;
    try {
        const auto json = nlohmann::json::parse(file);
        for (const auto& row : json.at("rows")) rows_.push_back(row_of(row));
    } catch (const std::exception& error) {
        fail(ExitCode::data, "{}: {}", path_, error.what());
    }
    return true;
}

void File::write() const {
    std::ofstream file(path_);
    file << "{\n  \"about\": [\n    \"Golden runs, " << kSteps
         << " steps each: tests/golden/golden.h says what is hashed and how to write this file.\"";
    for (const std::string& line : selection()) file << ",\n    " << nlohmann::json(line).dump();
    file << "\n  ],\n  \"rows\": [";
    const char* separator = "\n    ";
    for (const Case& c : all_cases()) {
        const Hashes* hashes = find(c);
        if (hashes == nullptr) continue;
        file << separator << json_of({c, *hashes}).dump();
        separator = ",\n    ";
    }
    file << "\n  ]\n}\n";
    require(file.good(), ExitCode::data, "{}: cannot be written", path_);
}

const Hashes* File::find(const Case& c) const {
    const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& r) { return r.c == c; });
    return row == rows_.end() ? nullptr : &row->hashes;
}

void File::put(const Case& c, const Hashes& hashes) {
    std::erase_if(rows_, [&](const Row& row) { return row.c == c; });
    rows_.push_back({c, hashes});
}

void File::drop_unknown() {
    const auto& known = all_cases();
    std::erase_if(
        rows_, [&](const Row& row) { return std::find(known.begin(), known.end(), row.c) == known.end(); });
}

std::string difference(const Hashes& got, const Hashes& wanted) {
    std::string changed;
    const auto compare = [&](const char* what, const std::string& a, const std::string& b) {
        if (a != b) changed += fmt::format("{}{} {} (was {})", changed.empty() ? "" : ", ", what, a, b);
    };
    compare("losses", got.losses, wanted.losses);
    compare("gradient norms", got.norms, wanted.norms);
    compare("final weights", got.weights, wanted.weights);
    if (changed.empty()) return changed;
    return fmt::format("changed: {}; last loss {:.9f} (was {:.9f})", changed, got.last_loss,
                       wanted.last_loss);
}

namespace {
bool asks_for(const char* mode) {
    const char* wanted = std::getenv("FP8FLOW_GOLDEN");
    return wanted != nullptr && std::string(wanted) == mode;
}
}  // namespace

bool writing() { return asks_for("write"); }
bool required() { return asks_for("require"); }

}  // namespace fp8flow::golden
