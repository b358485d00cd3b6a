// SPDX-License-Identifier: MIT
// report.html: one file a run with everything worth looking at, drawn in the browser from the data that it
// holds as JSON. It loads nothing: styles, script and data are inside. The template is page.html, made part
// of the program by cmake/ReportPage.cmake.
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"
#include "model/report/svg.h"
#include "model/train/trainer.h"

#include <nlohmann/json.hpp>

#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fp8flow::report {

inline constexpr const char* kPageFile = "report.html";
inline constexpr std::array<std::string_view, 8> kPageSections = {
    "summary", "loss", "stages", "timeline", "memory", "routing", "configuration", "machine"};

// Every section is there; one without data says why (`absent`), or where it comes from.
class Page {
public:
    Page(std::string title, const Config& config, const Provenance& provenance);

    void fact(const std::string& name, const std::string& value);  // a line of the summary
    void set(std::string_view section, nlohmann::json data, const std::string& note = "");
    void absent(std::string_view section, const std::string& why);
    // The same colour wherever the name appears.
    void color(const std::string& name, std::string_view color) { data_["colors"][name] = color; }

    const nlohmann::json& data() const { return data_; }
    std::string html() const;

private:
    nlohmann::json data_;
};

// Charts of the section `loss`: [chart, ...]. Series are thinned to what a screen shows.
nlohmann::json chart_json(const Panel& panel, const std::string& title, const std::string& x_label);

// Rows of stacked bars, for `stages` and `memory`.
struct PageRow {
    std::string label;
    std::vector<std::pair<std::string, double>> parts;
};
struct PageRows {
    std::string name;
    std::vector<PageRow> rows;
};
// `unit` "bytes": shown in KiB, MiB or GiB.
nlohmann::json bars_json(const std::vector<PageRows>& groups, const std::string& unit);
// Bytes by category: of parameters, of what is saved for the backward; and the workspace.
std::vector<PageRow> memory_rows(const std::map<std::string, int64_t>& parameters,
                                 const std::map<std::string, int64_t>& saved, int64_t workspace);

// How evenly tokens went to experts, over a run, in bounded memory.
class RoutingHistory {
public:
    void add(int64_t iteration, std::span<const LayerLoad> load);
    void add(const nlohmann::json& record);  // of metrics.jsonl
    bool empty() const { return layers_.empty(); }
    // A group of the section `routing`: a row a layer, and the worst layer over the iterations.
    nlohmann::json json(const std::string& name) const;

private:
    struct Layer {
        LayerLoad last;
        double worst = 0, sum = 0;
        int64_t steps = 0;
    };
    static constexpr size_t kMostPoints = 2048;

    void add_worst(int64_t iteration, double worst);

    std::map<int, Layer> layers_;
    std::vector<std::pair<int64_t, double>> points_;  // the worst of `stride_` iterations each
    int64_t stride_ = 1;
};

// The text of page.html, in the program.
std::string_view page_template();

}  // namespace fp8flow::report
