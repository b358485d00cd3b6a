// SPDX-License-Identifier: MIT
// The data of report.html, thinned and escaped, put into its template.
#include "model/report/page/page.h"

#include "kernels/core/error.h"
#include "model/report/svg_canvas.h"
#include "model/report/table.h"
#include "model/report/titles.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

namespace {

using nlohmann::json;

constexpr size_t kMostPoints = 2000;  // of a curve

// Of every run of points the lowest and the highest.
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
    }
}

// JSON that no HTML parser takes for the end of the script, or for anything else.
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

Page::Page(std::string title, const Config& config, const Provenance& provenance) {
    data_ = {{"format", 1},
             {"title", std::move(title)},
             {"subtitle", model_shape(config) + "; " + device_name(provenance)},
             {"palette", kPalette},
             {"colors", json::object()},
             {"sections", json::object()}};
    for (const std::string_view section : kPageSections) absent(section, "not part of this run");
    set("summary", json::array());
    set("configuration", dump_config(config));
    set("machine", machine_rows(provenance));
}

void Page::fact(const std::string& name, const std::string& value) {
    data_["sections"]["summary"]["data"].push_back({name, value});
}

void Page::set(std::string_view section, json data, const std::string& note) {
    FP8FLOW_CHECK(std::find(kPageSections.begin(), kPageSections.end(), section) != kPageSections.end(),
                  "section {}", section);
    data_["sections"][std::string(section)] = {{"data", std::move(data)}, {"note", note}};
}

void Page::absent(std::string_view section, const std::string& why) { set(section, nullptr, why); }

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
        html += title ? escape_xml(data_["title"].get<std::string>()) : inside_script(data_);
        rest.remove_prefix(title ? kTitle.size() : kData.size());
    }
}

json chart_json(const Panel& panel, const std::string& title, const std::string& x_label) {
    json chart = {{"title", title},          {"x_label", x_label},     {"suffix", panel.tick_suffix},
                  {"series", json::array()}, {"lines", json::array()}, {"bands", json::array()}};
    for (const Series& series : panel.series) {
        json one = {{"name", series.name}, {"dashed", series.dashed}, {"points", series.points}};
        thin(series, one["x"], one["y"]);
        chart["series"].push_back(std::move(one));
    }
    for (const ReferenceLine& line : panel.lines)
        chart["lines"].push_back({{"y", line.y}, {"label", line.label}});
    for (const Band& band : panel.bands)
        chart["bands"].push_back(
            {{"low", band.low}, {"high", band.high}, {"label", band.label}, {"color", band.color}});
    return chart;
}

json bars_json(const std::vector<PageRows>& groups, const std::string& unit) {
    json result = {{"unit", unit}, {"groups", json::array()}};
    for (const PageRows& group : groups) {
        json rows = json::array();
        for (const PageRow& row : group.rows) {
            json parts = json::array();
            for (const auto& [name, value] : row.parts)
                if (value > 0 && std::isfinite(value)) parts.push_back({{"name", name}, {"value", value}});
            rows.push_back({{"label", row.label}, {"parts", std::move(parts)}});
        }
        result["groups"].push_back({{"name", group.name}, {"rows", std::move(rows)}});
    }
    return result;
}

std::vector<PageRow> memory_rows(const std::map<std::string, int64_t>& parameters,
                                 const std::map<std::string, int64_t>& saved, int64_t workspace) {
    std::vector<PageRow> rows = {{"parameters", {}},
                                 {"saved for backward", {}},
                                 {"workspace", {{"workspace, reserved", static_cast<double>(workspace)}}}};
    for (const auto& [name, bytes] : parameters) rows[0].parts.emplace_back(name, static_cast<double>(bytes));
    for (const auto& [name, bytes] : saved) rows[1].parts.emplace_back(name, static_cast<double>(bytes));
    return rows;
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
    if (!load.empty()) add_worst(iteration, worst);
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

void RoutingHistory::add_worst(int64_t iteration, double worst) {
    if (!points_.empty() && points_.back().first / stride_ == iteration / stride_ &&
        points_.back().first < iteration) {
        points_.back().second = std::max(points_.back().second, worst);
        return;
    }
    while (!points_.empty() && points_.back().first >= iteration) points_.pop_back();  // done again
    points_.emplace_back(iteration, worst);
    if (points_.size() <= kMostPoints) return;
    stride_ *= 2;
    std::vector<std::pair<int64_t, double>> kept;
    for (const auto& point : points_)
        if (!kept.empty() && kept.back().first / stride_ == point.first / stride_)
            kept.back().second = std::max(kept.back().second, point.second);
        else
            kept.push_back(point);
    points_ = std::move(kept);
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
    if (points_.size() > 1) {
        nlohmann::json x = nlohmann::json::array(), y = nlohmann::json::array();
        for (const auto& [iteration, worst] : points_) {
            x.push_back(iteration);
            y.push_back(worst);
        }
        group["over"] = {{"x", std::move(x)}, {"y", std::move(y)}};
    }
    return group;
}

}  // namespace fp8flow::report
