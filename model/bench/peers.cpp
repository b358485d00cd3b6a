// SPDX-License-Identifier: MIT
// Reading peers' figures, and choosing the one that a row is compared with.
#include "model/bench/peers.h"

#include "model/safetensors/file.h"
#include "model/safetensors/json.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <sstream>

namespace fp8flow::bench {

namespace {

PeerFigure figure_of(const std::string& line, const std::string& place) {
    const auto json = parse_json(line, place, ExitCode::usage);
    require(json.is_object(), ExitCode::usage, "{}: want a JSON object, got '{}'", place, printable(line));
    const auto text = [&](const char* key, const char* otherwise) -> std::string {
        if (!json.contains(key) && otherwise != nullptr) return otherwise;
        require(json.contains(key) && json[key].is_string(), ExitCode::usage, "{}: '{}': want text", place,
                key);
        return json[key].get<std::string>();
    };
    require(json.contains("us") && json["us"].is_number() && json["us"].get<double>() > 0, ExitCode::usage,
            "{}: 'us': want a positive number", place);
    require(!json.contains("gpus") || json["gpus"].is_number_integer(), ExitCode::usage,
            "{}: 'gpus': want a whole number", place);
    const std::string operation = text("operation", nullptr);
    const Case& what = find_case(operation);
    const Shape shape(what.name, what.keys, Size::layer, text("shape", nullptr));
    return {.operation = what.name,
            .shape = shape.text(),
            .seconds = json["us"].get<double>() * 1e-6,
            .peer = text("peer", "peer"),
            .gpu = text("gpu", ""),
            .source = text("source", ""),
            .gpus = json.value("gpus", int64_t{1})};
}

}  // namespace

std::vector<PeerFigure> parse_peers(std::string_view lines, const std::string& where) {
    std::vector<PeerFigure> figures;
    std::istringstream stream{std::string(lines)};
    int number = 0;
    for (std::string line; std::getline(stream, line);) {
        ++number;
        if (line.find_first_not_of(" \t\r") == std::string::npos || line[0] == '#') continue;
        figures.push_back(figure_of(line, fmt::format("{} line {}", where, number)));
    }
    return figures;
}

Peers::Peers() : figures_(parse_peers(kPeerFigures, "the list of peers")) {}

void Peers::add_measured_here(const std::string& path) {
    constexpr int64_t kMaxBytes = 16 << 20;
    const std::string text = read_text_file(path, ExitCode::usage, "--peers", kMaxBytes);
    for (PeerFigure& figure : parse_peers(text, "--peers " + path)) {
        std::erase_if(figures_, [&](const PeerFigure& old) {
            return !old.same_sitting && old.operation == figure.operation && old.shape == figure.shape &&
                   old.peer == figure.peer && old.gpus == figure.gpus;
        });
        figure.same_sitting = true;
        if (figure.source.empty()) figure.source = "same sitting";
        figures_.push_back(std::move(figure));
    }
}

bool comparable(const PeerFigure& figure, const std::string& gpu) {
    return figure.same_sitting || (!gpu.empty() && figure.gpu == gpu);
}

const PeerFigure* Peers::best(const std::string& operation, const std::string& shape, const std::string& gpu,
                              int64_t gpus) const {
    const PeerFigure* best = nullptr;
    for (const PeerFigure& figure : figures_) {
        if (figure.operation != operation || figure.shape != shape || figure.gpus != gpus) continue;
        const bool here = comparable(figure, gpu);
        if (best == nullptr || (here && !comparable(*best, gpu)) ||
            (here == comparable(*best, gpu) && figure.seconds < best->seconds))
            best = &figure;
    }
    return best;
}

}  // namespace fp8flow::bench
