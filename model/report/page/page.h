// SPDX-License-Identifier: MIT
// report.html: one file per run that draws its pictures in the browser, from the JSON inside it. It loads
// nothing. The template is page.html, which cmake/ReportPage.cmake makes part of the program. README.md says
// how to add a picture.
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/train/trainer.h"

#include <nlohmann/json.hpp>

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fp8flow::report {

inline constexpr const char* kPageFile = "report.html";

class Page {
public:
    // The title is the answer of the run; the subtitle says of which model and machine.
    Page(std::string title, std::string subtitle, const Provenance& provenance);

    void fact(const std::string& name, const std::string& value);  // a line of the summary
    void set(std::string_view key, nlohmann::json value) { data_[key] = std::move(value); }
    std::string html() const;

private:
    nlohmann::json data_;
};

// A curve; a value that is not finite leaves a gap.
struct Series {
    std::string name = {};
    std::vector<double> x = {}, y = {};
    bool dashed = false, points = false;  // points: a dot at each value
};
struct Band {
    double low = 0, high = 0;
    std::string name;
};
struct Chart {
    std::string title, x_label, unit = {};  // unit: after each number
    std::vector<Series> series = {};
    std::vector<std::pair<std::string, double>> lines = {};  // horizontal
    std::vector<Band> bands = {};
};
// Curves of many points are thinned; their lowest, highest and last values stay.
nlohmann::json chart_json(const Chart& chart);
nlohmann::json bands_json(const std::vector<Band>& bands);

// How evenly tokens went to experts over a run.
class RoutingHistory {
public:
    void add(int64_t iteration, std::span<const LayerLoad> load);
    void add(const nlohmann::json& record);  // of metrics.jsonl
    bool empty() const { return layers_.empty(); }
    // A group of the card "Routing balance": one row per layer, and the worst layer of each iteration.
    nlohmann::json json(const std::string& name) const;

private:
    struct Layer {
        LayerLoad last;
        double worst = 0, sum = 0;
        int64_t steps = 0;
    };
    std::map<int, Layer> layers_;
    Series worst_{.name = "most tokens over the mean"};  // over iterations
};

std::string_view page_template();  // the text of page.html

}  // namespace fp8flow::report
