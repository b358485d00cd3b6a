// SPDX-License-Identifier: MIT
// report.html: one file per run that draws its pictures in the browser, from the JSON inside it. It loads
// nothing. The template is page.html, which is part of the program (model/base/embedded.h). README.md says
// how to add a picture.
#pragma once

#include "model/base/provenance.h"

#include <nlohmann/json.hpp>

#include <map>
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

struct Series {
    std::vector<double> x = {}, y = {};
};
// A curve of the chart `lines` in page.html: {"name", ...} and the points. A value that is not finite leaves
// a gap. Of many points, the lowest, the highest and the last stay.
nlohmann::json curve(const Series& series, nlohmann::json properties);

// How evenly tokens went to experts over a run.
class RoutingHistory {
public:
    void add(const nlohmann::json& record);  // of metrics.jsonl
    bool empty() const { return layers_.empty(); }
    // A group of the card "Routing balance": one row per layer, and the worst layer of each iteration.
    nlohmann::json group(const std::string& name) const;
    // By layer, mean over the iterations; empty without given routing.
    std::vector<double> equal_choices() const;

private:
    struct Layer {
        double last = 0, worst = 0, sum = 0, emptiest = 0;  // of the fullest expert, and the emptiest
        double equal = 0;  // sum of the shares of equal top-k choices, with given routing
        int64_t dead = 0, steps = 0, compared = 0;
    };
    std::map<int64_t, Layer> layers_;
    Series worst_;           // over iterations
    bool compared_ = false;  // with given routing
};

}  // namespace fp8flow::report
