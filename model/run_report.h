// What a run tells its user: log lines (terminal and file), metrics, the closing summary. Only rank 0 speaks.
#pragma once

#include "model/config.h"
#include "model/output.h"
#include "model/trainer.h"

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace fp8flow {

// Prints on rank 0 and appends to <out>/<name>; silent elsewhere.
class RunLog {
public:
    RunLog() = default;  // silent
    RunLog(const OutputFolder& folder, std::string_view name);
    void line(std::string_view text);

private:
    std::optional<LineFile> file_;
};

// Model, data, ranks, recipe, wire, casts: what is about to run.
void report_start(RunLog& log, const Config& config, Trainer& trainer, const TokenSource& data,
                  const BackendChoice& backend, int world_size);
nlohmann::json step_json(const Config& config, const StepResult& result, int world_size);
// One Megatron-style line.
std::string step_line(const Config& config, const StepResult& result, int world_size,
                      std::optional<double> eta_seconds);
// "held-out loss 2.10 nats = 3.03 bits per byte"
std::string evaluation_text(const Config& config, double nats);

}  // namespace fp8flow
