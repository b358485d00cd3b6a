// SPDX-License-Identifier: MIT
// Thins and escapes the data of report.html and puts them into its template.
#include "model/report/page/page.h"

#include "kernels/core/error.h"
#include "model/report/table.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

namespace {

using nlohmann::json;

constexpr size_t kMostPoints = 2000;  // of a curve

// Keeps the lowest and the highest of every run of points, and the last point.
void thin(const Series& series, json& x, json& y) {
    const size_t count = series.x.size();
    const size_t run = count <= kMostPoints ? 1 : (2 * count + kMostPoints - 1) / kMostPoints;
    x = json::array();
    y = json::array();
    const auto add = [&](size_t i) {
        x.push_back(series.x[i]);
        y.push_back(series.y[i]);  // not finite: null
    };
    for (size_t from = 0; from < count; from += run) {
        const size_t to = std::min(from + run, count);
        size_t low = from, high = from;
        for (size_t i = from; i < to; ++i) {
            if (!std::isfinite(series.y[low]) || series.y[i] < series.y[low]) low = i;
            if (!std::isfinite(series.y[high]) || series.y[i] > series.y[high]) high = i;
        }
        add(std::min(low, high));
        if (low != high) add(std::max(low, high));
        if (to == count && std::max(low, high) + 1 != to) add(count - 1);
    }
}

// An HTML parser finds no tag, and so no end of the script, in this JSON.
std::string inside_script(const json& data) {
    std::string text;
    for (const char c : data.dump(-1, ' ', false, json::error_handler_t::replace)) {
        switch (c) {
            case '<': text += "\\u003c"; break;
            case '>': text += "\\u003e"; break;
            case '&': text += "\\u0026"; break;
            default: text += c;
        }
    }
    return text;
}

std::string escape_html(const std::string& text) {
    std::string out;
    for (const char c : text) {
        switch (c) {
            case '&': out += "&amp;"; break;
            case '<': out += "&lt;"; break;
            case '>': out += "&gt;"; break;
            default: out += c;
        }
    }
    return out;
}

json machine_rows(const Provenance& provenance) {
    const MachineFacts& machine = provenance.machine;
    json rows = json::array();
    if (!machine.gpu.empty()) {
        rows.push_back({"GPU", fmt::format("{} x {}", provenance.gpus, machine.gpu)});
        if (machine.gpu_clock_hertz > 0)
            rows.push_back({"highest clock", fmt::format("{:.0f} MHz", machine.gpu_clock_hertz * 1e-6)});
    }
    rows.push_back({"CPU", fmt::format("{}, {} cores online", machine.cpu, machine.host_cores)});
    rows.push_back({"ranks", std::to_string(provenance.ranks)});
    rows.push_back({"commit", provenance.commit});
    rows.push_back({"date", provenance.date});
    rows.push_back({"command", provenance.command});
    return rows;
}

}  // namespace

Page::Page(std::string title, std::string subtitle, const Provenance& provenance)
    : data_{{"format", 2},
            {"title", std::move(title)},
            {"subtitle", std::move(subtitle)},
            {"facts", json::array()},
            {"machine", machine_rows(provenance)}} {}

void Page::fact(const std::string& name, const std::string& value) {
    data_["facts"].push_back({name, value});
}

std::string Page::html() const {
    std::string html;
    std::string_view rest = page_template();
    constexpr std::string_view kTitle = "{{TITLE}}", kData = "{{DATA}}";
    while (true) {
        const size_t at = rest.find("{{");
        html += rest.substr(0, at);
        if (at == std::string_view::npos) return html;
        rest.remove_prefix(at);
        const bool title = rest.starts_with(kTitle);
        FP8FLOW_CHECK(title || rest.starts_with(kData), "page.html: {}", rest.substr(0, 20));
        html += title ? escape_html(data_["title"].get<std::string>()) : inside_script(data_);
        rest.remove_prefix(title ? kTitle.size() : kData.size());
    }
}

json bands_json(const std::vector<Band>& bands) {
    json result = json::array();
    for (const Band& band : bands)
        result.push_back({{"low", band.low}, {"high", band.high}, {"name", band.name}});
    return result;
}

json chart_json(const Chart& chart) {
    json result = {{"title", chart.title},    {"x_label", chart.x_label}, {"unit", chart.unit},
                   {"series", json::array()}, {"lines", json::array()},   {"bands", bands_json(chart.bands)}};
    for (const Series& series : chart.series) {
        json one = {{"name", series.name}, {"dashed", series.dashed}, {"points", series.points}};
        thin(series, one["x"], one["y"]);
        result["series"].push_back(std::move(one));
    }
    for (const auto& [name, y] : chart.lines) result["lines"].push_back({{"name", name}, {"y", y}});
    return result;
}

void RoutingHistory::add(int64_t iteration, std::span<const LayerLoad> load) {
    double worst = 0;
    for (const LayerLoad& one : load) {
        Layer& layer = layers_[one.layer];
        layer.last = one;
        layer.worst = std::max(layer.worst, one.max);
        layer.sum += one.max;
        ++layer.steps;
        worst = std::max(worst, one.max);
    }
    if (load.empty()) return;
    while (!worst_.x.empty() && worst_.x.back() >= static_cast<double>(iteration)) {  // repeated
        worst_.x.pop_back();
        worst_.y.pop_back();
    }
    worst_.x.push_back(static_cast<double>(iteration));
    worst_.y.push_back(worst);
}

void RoutingHistory::add(const nlohmann::json& record) {
    const auto values = [&](const char* key) -> const nlohmann::json* {
        return record.contains(key) && record[key].is_array() ? &record[key] : nullptr;
    };
    const nlohmann::json* layers = values("moe_layers");
    if (layers == nullptr || !record.contains("iteration")) return;
    const auto number = [&](const char* key, size_t i) {
        const nlohmann::json* all = values(key);
        return all != nullptr && i < all->size() && (*all)[i].is_number() ? (*all)[i].get<double>() : 0.0;
    };
    std::vector<LayerLoad> load;
    for (size_t i = 0; i < layers->size(); ++i)
        load.push_back({.layer = static_cast<int>(number("moe_layers", i)),
                        .max = number("load_max", i),
                        .min = number("load_min", i),
                        .cv = number("load_cv", i),
                        .dead_experts = static_cast<int64_t>(number("dead_experts", i))});
    add(record["iteration"].get<int64_t>(), load);
}

nlohmann::json RoutingHistory::json(const std::string& name) const {
    nlohmann::json group = {{"name", name},
                            {"columns",
                             {"layer", "fullest expert over the mean, last", "mean", "worst",
                              "emptiest, last", "experts without a token, last"}},
                            {"rows", nlohmann::json::array()}};
    for (const auto& [number, layer] : layers_)
        group["rows"].push_back({std::to_string(number), format_fixed(layer.last.max, 2) + " x",
                                 format_fixed(layer.sum / static_cast<double>(layer.steps), 2) + " x",
                                 format_fixed(layer.worst, 2) + " x", format_fixed(layer.last.min, 2) + " x",
                                 format_count(layer.last.dead_experts)});
    if (worst_.x.size() > 1)
        group["over"] = chart_json({.title = name,
                                    .x_label = "iteration (worst layer)",
                                    .unit = " x",
                                    .series = {worst_},
                                    .lines = {{"balanced", 1.0}}});
    return group;
}

}  // namespace fp8flow::report
