// SPDX-License-Identifier: MIT
// Thins and escapes the data of report.html and puts them into its template.
#include "model/report/page/page.h"

#include "kernels/core/error.h"
#include "model/base/embedded.h"
#include "model/report/table.h"

#include <algorithm>
#include <cmath>

namespace fp8flow::report {

namespace {

using nlohmann::json;

constexpr size_t kMostPoints = 2000;  // of a curve

// Escapes '<', so that an HTML parser finds no tag, and no end of the script, in the JSON.
std::string inside_script(const json& data) {
    std::string text;
    for (const char c : data.dump(-1, ' ', false, json::error_handler_t::replace))
        text += c == '<' ? "\\u003c" : std::string(1, c);
    return text;
}

}  // namespace

Page::Page(std::string title, std::string subtitle, const Provenance& provenance)
    : data_{{"format", 2},
            {"title", std::move(title)},
            {"subtitle", std::move(subtitle)},
            {"facts", json::array()}} {
    add_provenance(data_, provenance);
}

void Page::fact(const std::string& name, const std::string& value) {
    data_["facts"].push_back({name, value});
}

std::string Page::html() const {
    constexpr std::string_view kData = "{{DATA}}";
    const std::string_view page = page_files().front().text;
    const size_t at = page.find(kData);
    FP8FLOW_CHECK(at != std::string_view::npos, "page.html without {}", kData);
    return fmt::format("{}{}{}", page.substr(0, at), inside_script(data_), page.substr(at + kData.size()));
}

json curve(const Series& series, json properties) {
    json x = json::array(), y = json::array();
    const auto keep = [&](size_t i) {
        x.push_back(series.x[i]);
        y.push_back(series.y[i]);  // not finite: null
    };
    const size_t count = series.x.size();
    const size_t run = count <= kMostPoints ? 1 : (2 * count + kMostPoints - 1) / kMostPoints;
    for (size_t from = 0; from < count; from += run) {
        const size_t to = std::min(from + run, count);
        size_t low = from, high = from;
        for (size_t i = from; i < to; ++i) {
            if (!std::isfinite(series.y[low]) || series.y[i] < series.y[low]) low = i;
            if (!std::isfinite(series.y[high]) || series.y[i] > series.y[high]) high = i;
        }
        keep(std::min(low, high));
        if (low != high) keep(std::max(low, high));
        if (to == count && std::max(low, high) + 1 != to) keep(count - 1);
    }
    properties.update({{"x", std::move(x)}, {"y", std::move(y)}});
    return properties;
}

void RoutingHistory::add(const json& record) {
    const auto number = [&](const char* key, size_t i) {
        const auto values = record.find(key);
        const bool given = values != record.end() && values->is_array() && i < values->size();
        return given && values->at(i).is_number() ? values->at(i).get<double>() : 0.0;
    };
    const auto layers = record.find("moe_layers");
    if (layers == record.end() || !layers->is_array() || layers->empty()) return;
    double worst = 0;
    for (size_t i = 0; i < layers->size(); ++i) {
        Layer& layer = layers_[static_cast<int64_t>(number("moe_layers", i))];
        layer.last = number("load_max", i);
        layer.emptiest = number("load_min", i);
        layer.dead = static_cast<int64_t>(number("dead_experts", i));
        layer.worst = std::max(layer.worst, layer.last);
        layer.sum += layer.last;
        ++layer.steps;
        if (record.contains("equal_choices")) {
            layer.equal += number("equal_choices", i);
            ++layer.compared;
            compared_ = true;
        }
        worst = std::max(worst, layer.last);
    }
    worst_.x.push_back(record.at("iteration"));
    worst_.y.push_back(worst);
}

std::vector<double> RoutingHistory::equal_choices() const {
    std::vector<double> shares;
    for (const auto& [number, layer] : layers_)
        if (compared_) shares.push_back(layer.equal / f64(layer.compared));
    return shares;
}

json RoutingHistory::group(const std::string& name) const {
    json group = {{"name", name},
                  {"columns",
                   {"layer", "fullest expert over the mean, last", "mean", "worst", "emptiest, last",
                    "experts without a token, last"}},
                  {"rows", json::array()}};
    const auto times = [](double load) { return format_fixed(load, 2) + " x"; };
    if (compared_) group["columns"].push_back("top-k choices equal to the given ones, mean");
    for (const auto& [number, layer] : layers_) {
        json row = {std::to_string(number), times(layer.last),     times(layer.sum / f64(layer.steps)),
                    times(layer.worst),     times(layer.emptiest), format_count(layer.dead)};
        if (compared_) row.push_back(format_fixed(100 * layer.equal / f64(layer.compared), 2) + " %");
        group["rows"].push_back(std::move(row));
    }
    if (worst_.x.size() > 1)
        group["over"] = {{"title", name},
                         {"x_label", "iteration (worst layer)"},
                         {"unit", " x"},
                         {"series", json::array({curve(worst_, {{"name", "most tokens over the mean"}})})},
                         {"lines", json::array({{{"name", "balanced"}, {"y", 1.0}}})}};
    return group;
}

}  // namespace fp8flow::report
